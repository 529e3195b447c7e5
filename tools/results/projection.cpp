// SPDX-License-Identifier: Apache-2.0
#include "results/projection.hpp"

#include <algorithm>

namespace distmoe::tools {
namespace {

constexpr double kBF16Bytes = 2.0;

/// That `top_k` distinct experts of `num_experts` are none of `own`.
double chance_of_none(std::int64_t num_experts, std::int64_t own, std::int64_t top_k) {
  double chance = 1.0;
  for (std::int64_t k = 0; k < top_k; ++k) {
    chance *= static_cast<double>(num_experts - own - k) / static_cast<double>(num_experts - k);
  }
  return std::max(chance, 0.0);
}

/// The products take longer than reading their weights.
bool is_of_products(const ResultRow& row) {
  return row.dense_tflops && row.read_tb_s &&
         row.flops / *row.dense_tflops > row.weight_bytes / *row.read_tb_s;
}

bool is_projectable(const ResultRow& row) {
  return row.mode == "forward" && row.routing == "uniform" && row.combine == "per_route" &&
         row.precision == "bf16" && is_of_products(row);
}

Projection project(const ResultRow& one, const ResultRow& two, double bound_us, double link_gb_s) {
  // A shape with experts for each rank has more of them on more ranks.
  const std::int64_t experts =
      two.experts == one.experts ? one.experts : one.experts * kProjectedRanks;
  Projection result{.one = &one, .two = &two};
  result.link_of_two_us = link_us_of(two, 2, two.experts, link_gb_s);
  result.link_us = link_us_of(one, kProjectedRanks, experts, link_gb_s);
  result.seen = std::max(0.0, two.median_us - one.median_us) / result.link_of_two_us;
  result.us = std::max(one.median_us + result.seen * result.link_us,
                       one.median_us - bound_us + result.link_us);
  return result;
}

}  // namespace

double link_us_of(const ResultRow& row, std::int64_t num_ranks, std::int64_t num_experts,
                  double link_gb_s) {
  const auto tokens = static_cast<double>(row.tokens);
  const auto peers = static_cast<double>(num_ranks - 1);
  const double sent =
      tokens * peers * (1.0 - chance_of_none(num_experts, num_experts / num_ranks, row.top_k));
  const double returned =
      tokens * static_cast<double>(row.top_k) * peers / static_cast<double>(num_ranks);
  const double bytes = (sent + returned) * static_cast<double>(row.hidden_dim) * kBF16Bytes;
  return bytes / (link_gb_s * 1e3);
}

std::vector<Projection> projections_of(const ResultGroup& rows) {
  std::vector<Projection> all;
  for (const ResultRow* one : rows) {
    if (one->ranks != 1 || !one->bound_us || !is_projectable(*one)) continue;
    const auto two = std::ranges::find_if(rows, [&](const ResultRow* row) {
      return row->ranks == 2 && row->link_gb_s && row->shape == one->shape &&
             row->tokens == one->tokens && row->machine == one->machine &&
             row->backend == one->backend && row->call() == one->call();
    });
    if (two == rows.end()) continue;
    all.push_back(
        project(*one, **two, one->bound_us.value_or(0.0), (*two)->link_gb_s.value_or(0.0)));
  }
  return all;
}

}  // namespace distmoe::tools
