// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_case.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <utility>

#include "core/check.hpp"
#include "distmoe/memory_plan.hpp"

namespace distmoe::tools {
namespace {

constexpr std::uint64_t kRoutingSeed = 7;
constexpr std::uint64_t kSeedsPerSet = 1 << 20;  ///< more than there are ranks

RoutedTokens route(const BenchSetting& setting, const RoutingSize& size, int set, int rank) {
  const std::uint64_t seed = kRoutingSeed + static_cast<std::uint64_t>(set) * kSeedsPerSet +
                             static_cast<std::uint64_t>(rank);
  switch (setting.options.routing) {
    case RoutingKind::kUniform: return uniform_routing(size, seed);
    case RoutingKind::kZipf: return zipf_routing(size, seed);
    case RoutingKind::kCaptured: break;
  }
  return setting.captured->take(size,
                                (std::int64_t{set} * setting.num_ranks + rank) * size.num_tokens);
}

/// The largest number of rows that a call brings a rank, as a factor of T * K.
double capacity_factor(const BenchCase& row) {
  return std::max(1.0, static_cast<double>(row.traffic.rows) /
                           static_cast<double>(row.num_tokens * row.shape.top_k));
}

/// What a case has of the mean of its sets.
constexpr std::array kMeans = {&CallTraffic::flops,          &CallTraffic::weight_bytes,
                               &CallTraffic::gradient_bytes, &CallTraffic::link_bytes,
                               &CallTraffic::dispatch_bytes, &CallTraffic::return_bytes,
                               &CallTraffic::combine_bytes,  &CallTraffic::output_bytes};

class CaseBuilder {
 public:
  CaseBuilder(const BenchShape& shape, std::int64_t num_tokens, const BenchSetting& setting)
      : setting_(setting) {
    case_.shape = shape;
    case_.num_tokens = num_tokens;
    Config& config = case_.config;
    config.max_tokens = num_tokens;
    config.hidden_dim = shape.hidden_dim;
    config.intermediate_dim = shape.intermediate_dim;
    config.top_k = shape.top_k;
    config.num_experts = shape.experts_of(setting.num_ranks);
    config.max_moe_layers_per_activation_slot = 1;
    config.precision = setting.options.precision;
    config.pipeline = setting.options.pipeline;
    config.combine = setting.options.combine;
    config.num_sms = setting.options.num_sms;
    config.inference = !is_training();
    config.activation_policy = setting.options.activation_policy;
    config.timeout = setting.options.timeout;
    validate(config);
  }

  void add_set() {
    const Config& config = case_.config;
    const RoutingSize size{case_.num_tokens, config.top_k, config.num_experts};
    std::vector<RoutedTokens> ranks;
    for (int rank = 0; rank < setting_.num_ranks; ++rank) {
      ranks.push_back(route(setting_, size, static_cast<int>(case_.sets.size()), rank));
      has_repeats_ = has_repeats_ || has_repeated_experts(ranks.back(), config.top_k);
    }
    const CallTraffic traffic =
        is_training() ? count_training_traffic(case_.shape, ranks, config.combine, config.precision)
                      : count_traffic(case_.shape, ranks, config.combine, config.precision);
    for (const auto sum : kMeans) case_.traffic.*sum += traffic.*sum;
    case_.traffic.rows = std::max(case_.traffic.rows, traffic.rows);
    case_.sets.push_back(std::move(ranks[static_cast<std::size_t>(setting_.rank)]));
  }

  BenchCase finish() {
    add_set();
    const double weights = case_.traffic.weight_bytes;
    const double tokens =
        4.0 * static_cast<double>(case_.num_tokens) * static_cast<double>(case_.shape.hidden_dim);
    const int num_sets = copies_beyond_cache(weights + tokens, setting_.cache_bytes, 2,
                                             std::max(setting_.num_laps, 2));
    case_.num_weight_copies = copies_beyond_cache(weights, setting_.cache_bytes, 1, num_sets);
    while (std::ssize(case_.sets) < num_sets) add_set();
    for (const auto sum : kMeans) case_.traffic.*sum /= num_sets;
    case_.config.distinct_experts = !has_repeats_;
    case_.config.device_scratch_capacity_factor = capacity_factor(case_);
    if (is_training() && !setting_.options.recompute) {
      case_.config.activation_slot_bytes =
          plan_memory(case_.config, setting_.num_ranks).max_useful_slot_bytes;
    }
    return std::move(case_);
  }

 private:
  bool is_training() const { return setting_.options.mode == BenchMode::kTrain; }

  const BenchSetting& setting_;
  BenchCase case_;
  bool has_repeats_ = false;
};

}  // namespace

int copies_beyond_cache(double bytes, std::int64_t cache_bytes, int least, int most) {
  constexpr double kTimesTheCache = 2.0;
  const double wanted = std::ceil(kTimesTheCache * static_cast<double>(cache_bytes) / bytes);
  return wanted >= most ? most : std::max(static_cast<int>(wanted), least);
}

BenchCase make_bench_case(const BenchShape& shape, std::int64_t num_tokens,
                          const BenchSetting& setting) {
  return CaseBuilder(shape, num_tokens, setting).finish();
}

}  // namespace distmoe::tools
