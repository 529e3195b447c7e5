// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_summary.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>

namespace distmoe::tools {
namespace {

constexpr double kMicroseconds = 1e6;

/// Work per second of samples in microseconds per unit of work.
std::optional<double> rate_at(double us_per_unit) {
  return us_per_unit > 0.0 ? std::optional(kMicroseconds / us_per_unit) : std::nullopt;
}
std::optional<double> median_rate_of(const Samples& us_per_unit) {
  return rate_at(spread_of(us_per_unit).median);
}
std::optional<double> best_rate_of(const Samples& us_per_unit) {
  return rate_at(spread_of(us_per_unit).p10);
}

std::optional<double> larger(const std::optional<double>& one, const std::optional<double>& other) {
  return one && other ? std::max(one, other) : one;
}

std::optional<double> scaled(const std::optional<double>& value, double factor) {
  return value ? std::optional(*value * factor) : std::nullopt;
}

}  // namespace

std::optional<double> ratio_of(const Samples& samples, const Samples& divisors) {
  Samples ratios;
  for (std::size_t round = 0; round < samples.size(); ++round) {
    if (divisors[round] <= 0.0) return std::nullopt;
    ratios.push_back(samples[round] / divisors[round]);
  }
  return spread_of(ratios).median;
}

MachineRates rates_of(const CeilingSamples& samples) {
  return {best_rate_of(samples.dense), best_rate_of(samples.copy), best_rate_of(samples.read),
          best_rate_of(samples.write), best_rate_of(samples.link)};
}

BenchCeilings ceilings_of(const MachineRates& rates) {
  return {.dense_tflops = scaled(rates.flops, 1e-12),
          .copy_tb_s = scaled(rates.copied_bytes, 1e-12),
          .read_tb_s = scaled(rates.read_bytes, 1e-12),
          .write_tb_s = scaled(rates.written_bytes, 1e-12),
          .link_gb_s = scaled(rates.link_bytes, 1e-9)};
}

BenchRow summarize_row(const BenchCase& plan, BenchMode mode, const RowSamples& samples,
                       const CallCheck& check, const MachineRates& rates, int ranks_per_device) {
  const double share = 1.0 / ranks_per_device;
  const MachineRates own{scaled(larger(rates.flops, best_rate_of(samples.bound)), share),
                         scaled(rates.copied_bytes, share), scaled(rates.read_bytes, share),
                         scaled(rates.written_bytes, share), scaled(rates.link_bytes, share)};
  BenchRow row;
  row.shape = plan.shape;
  row.tokens = plan.num_tokens;
  row.experts = plan.config.num_experts;
  row.us = spread_of(samples.us);
  row.traffic = plan.traffic;
  row.ceilings = ceilings_of(rates);
  row.rel_l2 = check.rel_l2();
  row.is_bitwise_repeatable = check.is_equal;
  if (const auto bound = scaled(median_rate_of(samples.bound), share)) {
    row.bound_us = plan.traffic.flops / *bound * kMicroseconds;
    // Samples of the bound are per floating-point operation.
    row.bound_ratio = scaled(ratio_of(samples.us, samples.bound), share / plan.traffic.flops);
  }
  for (const Samples& step : samples.steps) row.steps.push_back({.us = spread_of(step).median});
  for (const Samples& peer : samples.peers) {
    row.peers.push_back({.us = spread_of(peer), .ratio = ratio_of(peer, samples.us).value_or(0.0)});
  }
  switch (mode) {
    case BenchMode::kTrain:
      row.forward_us = spread_of(samples.forward).median;
      row.backward_us = spread_of(samples.backward).median;
      row.restore_us = spread_of(samples.restore).median;
      [[fallthrough]];
    case BenchMode::kForward:
    case BenchMode::kGemm:
      row.tflops = plan.traffic.flops / row.us.median * 1e-6;
      row.floor_us = products_floor_us(plan.traffic, own);
      break;
    case BenchMode::kExchangeDispatch:
      row.floor_us = exchange_dispatch_floor_us(plan.traffic, own);
      break;
    case BenchMode::kExchangeCombine:
      row.floor_us = exchange_combine_floor_us(plan.traffic, own);
      break;
    case BenchMode::kCombine: row.floor_us = combine_floor_us(plan.traffic, own); break;
    case BenchMode::kDispatch:
    case BenchMode::kExchange: break;
  }
  return row;
}

}  // namespace distmoe::tools
