// SPDX-License-Identifier: Apache-2.0
//
// What fits a budget: plan_memory is cheap, so the answers are searches over plans.
#include <algorithm>
#include <functional>
#include <limits>

#include "core/checked_math.hpp"
#include "core/current_error.hpp"
#include "distmoe/memory_plan.hpp"
#include "plan/capacity_rows.hpp"
#include "plan/layer_bytes.hpp"

namespace distmoe {
namespace {

constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();

class BudgetSearch {
 public:
  BudgetSearch(const Config& config, int ep_size, std::int64_t budget, const PlanTarget& target)
      : config_(config), ep_size_(ep_size), budget_(budget), target_(target) {}

  std::int64_t needed(const MemoryPlan& plan) const {
    return counts_host_scratch() ? plan.allocated_bytes
                                 : plan.allocated_bytes - plan.host_scratch_bytes;
  }
  std::int64_t needed(const Config& config) const {
    return needed(plan_memory(config, ep_size_, target_));
  }

  std::optional<std::int64_t> largest_max_tokens() const {
    return largest(kMaxTokens,
                   [](Config& config, std::int64_t tokens) { config.max_tokens = tokens; });
  }

  std::optional<std::int64_t> largest_num_slots() const {
    if (config_.inference) return std::nullopt;
    return largest(std::numeric_limits<std::int64_t>::max(),
                   [](Config& config, std::int64_t slots) { config.num_activation_slots = slots; });
  }

  std::optional<double> largest_scratch_factor() const {
    const std::int64_t most = capacity_rows(config_, ep_size_, ep_size_);
    const auto found = largest(
        most, [this](Config& config, std::int64_t rows) { set_factor(config, factor_of(rows)); });
    if (!found) return factor_without_rows();
    return *found == most ? static_cast<double>(ep_size_) : factor_of(*found);
  }

  bool factor_is_total() const { return config_.host_scratch && counts_host_scratch(); }

 private:
  using Setter = std::function<void(Config&, std::int64_t)>;

  /// A factor may plan no row: one that does is no suggestion, but of a plan that fits it is right.
  std::optional<double> factor_without_rows() const {
    const MemoryPlan plan = plan_memory(config_, ep_size_, target_);
    if (needed(plan) > budget_) return std::nullopt;
    return factor_is_total() ? plan.total_scratch_factor : plan.device_scratch_factor;
  }

  bool counts_host_scratch() const { return target_.backend == BackendKind::kCpu; }

  double factor_of(std::int64_t rows) const {
    return static_cast<double>(rows) / static_cast<double>(config_.max_tokens * config_.top_k);
  }

  void set_factor(Config& config, double factor) const {
    if (!config.host_scratch) {
      config.device_scratch_capacity_factor = factor;
    } else if (counts_host_scratch()) {
      config.host_scratch->total_scratch_capacity_factor = factor;
      config.device_scratch_capacity_factor =
          std::min(config.device_scratch_capacity_factor, factor);
    } else {
      config.device_scratch_capacity_factor = factor;
      config.host_scratch->total_scratch_capacity_factor =
          std::max(config.host_scratch->total_scratch_capacity_factor, factor);
    }
  }

  /// What is needed without the region of grad_h3 where it comes and goes with the rounding (D
  /// near F): this part alone grows with every value.
  std::int64_t needed_growing(const Config& config) const {
    const MemoryPlan plan = plan_memory(config, ep_size_, target_);
    if (is_block_scaled(config.precision)) return needed(plan);
    const std::int64_t rows =
        counts_host_scratch() ? plan.total_scratch_rows : plan.device_scratch_rows;
    const bool is_settled =
        checked_mul(rows, config.hidden_dim - config.intermediate_dim) >= kRegionAlignment / 2;
    if (is_settled) return needed(plan);
    return needed(plan) - LayerBytes<>{layer_dims(config)}.scratch_regions(rows).grad_h3;
  }

  template <typename Needed>
  bool fits(const Setter& set, std::int64_t value, const Needed& needed_bytes) const {
    Config config = config_;
    set(config, value);
    try {
      return needed_bytes(config) <= budget_;
    } catch (const Error&) {
      return false;  // beyond 64 bits, or a slot of fixed bytes under its minimum
    }
  }

  /// The largest value in [1, most], found by halving, whose growing part fits; then down to one
  /// that fits with its rounding.
  std::optional<std::int64_t> largest(std::int64_t most, const Setter& set) const {
    std::int64_t low = 0;
    std::int64_t high = most;
    while (low < high) {
      const std::int64_t middle = low + (high - low - 1) / 2 + 1;
      if (fits(set, middle, [this](const Config& c) { return needed_growing(c); })) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    while (low > 0 && !fits(set, low, [this](const Config& c) { return needed(c); })) --low;
    if (low == 0) return std::nullopt;
    return low;
  }

  const Config& config_;
  int ep_size_;
  std::int64_t budget_;
  PlanTarget target_;
};

BudgetReport report_of(const Config& config, int ep_size, std::int64_t budget_bytes,
                       const PlanTarget& target) {
  DISTMOE_CHECK(budget_bytes >= 0, kInvalidArgument, "the budget is ", budget_bytes,
                " bytes; it must be 0 or more");
  const BudgetSearch search(config, ep_size, budget_bytes, target);
  BudgetReport report;
  report.budget_bytes = budget_bytes;
  report.needed_bytes = search.needed(plan_memory(config, ep_size, target));
  report.fits = report.needed_bytes <= budget_bytes;
  report.largest_max_tokens = search.largest_max_tokens();
  report.largest_num_slots = search.largest_num_slots();
  report.largest_scratch_factor = search.largest_scratch_factor();
  report.factor_is_total = search.factor_is_total();
  return report;
}

}  // namespace

BudgetReport check_budget(const Config& config, int ep_size, std::int64_t budget_bytes,
                          const PlanTarget& target) {
  return only_errors("a budget", [&] { return report_of(config, ep_size, budget_bytes, target); });
}

}  // namespace distmoe
