// SPDX-License-Identifier: Apache-2.0
//
// Invariant: every plan equals a straightforward re-derivation in 128-bit integers, its parts add
// up, every region is a multiple of 128, and a call with fewer rows never needs more than the plan.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "distmoe/memory_plan.hpp"
#include "plan/layer_bytes.hpp"
#include "plan/plan_testing.hpp"

namespace distmoe {
namespace {

__extension__ using Wide = __int128;

Wide ceil_of(Wide a, Wide b) { return (a + b - 1) / b; }
Wide up(Wide bytes) { return ceil_of(bytes, 128) * 128; }
Wide dense(Wide r, Wide d) { return up(2 * r * d); }

/// The formulas of the page, written down once more in its own letters.
struct Derivation {
  const Config& c;
  Wide P, T, K, D, F, L;
  bool mx, nv;
  Wide p, v, g;

  Derivation(const Config& config, int ranks)
      : c(config),
        P(ranks),
        T(config.max_tokens),
        K(config.top_k),
        D(config.hidden_dim),
        F(config.intermediate_dim),
        L(ceil_of(config.num_experts, ranks)),
        mx(config.precision == Precision::kMXFP8),
        nv(config.precision == Precision::kNVFP4),
        p(nv ? 2 : 1),
        v(nv ? 16 : 32),
        g(nv ? 4 : 0) {}

  Wide row(Wide r, Wide d) const { return up(r * ceil_of(d, p)) + up(r * ceil_of(d, v) + r * g); }
  Wide col(Wide r, Wide d) const { return up(d * ceil_of(r, p)) + up(d * ceil_of(r, v)); }

  Wide rows(double factor) const {
    volatile double product = static_cast<double>(c.max_tokens * c.top_k) * factor;
    const double whole = std::floor(product + 0.5);
    const Wide cap =
        std::min(static_cast<Wide>(whole), T * P * (c.distinct_experts ? std::min(K, L) : K));
    return mx || nv ? (cap + L * 127) / 128 * 128 : cap;
  }

  Wide saved(Wide R) const {
    if (c.inference) return 0;
    if (c.activation_policy == ActivationPolicy::kLean) return dense(T, D) + dense(R, 2 * F);
    if (mx) return col(R, D) + dense(R, 2 * F) + col(R, F) + dense(T * K, D);
    return dense(R, D) + dense(R, 2 * F) + dense(T * K, D);
  }

  Wide scratch(Wide R) const {
    const bool mega = c.pipeline == Pipeline::kMega;
    if (mx || nv) {
      const Wide both = mega ? row(R, D) + row(R, F) : std::max(row(R, D), row(R, F));
      if (c.inference) return both + dense(R, 2 * F);
      return std::max(both, row(R, 2 * F)) + col(R, D) + dense(R, 2 * F) + col(R, F) + col(R, D) +
             dense(R, F) + col(R, 2 * F);
    }
    if (c.inference) return dense(R, D) + dense(R, 2 * F) + dense(R, F);
    const Wide grad_h3 = dense(R, F) + dense(R, D) > dense(R, 2 * F) ? dense(R, D) : 0;
    return dense(R, D) + dense(R, 2 * F) + dense(R, 2 * F) + dense(R, F) + grad_h3;
  }
};

class RandomConfig {
 public:
  explicit RandomConfig(unsigned seed) : random_(seed) {}

  Config next() {
    Config config;
    config.max_tokens = pick(1, chance(5) ? 200000 : 600);
    config.num_experts = pick(1, chance(3) ? 512 : 12);
    config.top_k = pick(1, std::min<std::int64_t>(config.num_experts, 12));
    config.max_moe_layers_per_activation_slot = pick(1, 70);
    config.num_activation_slots = pick(1, 9);
    config.device_scratch_capacity_factor = real(0.05, 6.0);
    if (chance(2)) {
      config.host_scratch =
          HostScratch{config.device_scratch_capacity_factor + real(0.0, 12.0), chance(2)};
    }
    config.distinct_experts = chance(2);
    config.inference = chance(3);
    config.pipeline = chance(2) ? Pipeline::kMega : Pipeline::kStaged;
    config.combine = chance(2) ? Combine::kPerRank : Combine::kPerRoute;
    choose_precision(config);
    if (!config.inference && chance(2)) config.activation_slot_capacity_factor = real(0.0, 3.0);
    return config;
  }
  int ranks() { return static_cast<int>(pick(1, chance(2) ? 9 : 72)); }
  std::int64_t pick(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random_);
  }

 private:
  bool chance(int one_in) { return pick(1, one_in) == 1; }
  double real(double least, double most) {
    return std::uniform_real_distribution<double>(least, most)(random_);
  }
  void choose_precision(Config& config) {
    const std::int64_t widest = chance(4) ? 16384 : 300;
    std::int64_t multiple = 1;
    if (chance(2)) {
      const bool four_bit = config.inference && chance(2);
      config.precision = four_bit ? Precision::kNVFP4 : Precision::kMXFP8;
      multiple = four_bit ? 16 : 32;
    } else if (!config.inference && chance(3)) {
      config.activation_policy = ActivationPolicy::kLean;
    }
    config.hidden_dim = multiple * pick(1, ceil_div(widest, multiple));
    config.intermediate_dim = multiple * pick(1, ceil_div(widest, multiple));
  }
  std::mt19937_64 random_;
};

std::int64_t sum_of(const std::vector<PlanBuffer>& buffers) {
  std::int64_t sum = 0;
  for (const PlanBuffer& buffer : buffers) {
    EXPECT_EQ(buffer.bytes % 128, 0) << buffer.name;
    EXPECT_GT(buffer.bytes, 0) << buffer.name;
    sum += buffer.bytes;
  }
  return sum;
}

void expect_sections_add_up(const MemoryPlan& plan) {  // reports: A102
  EXPECT_EQ(plan.communication_bytes, sum_of(plan.communication_buffers));
  EXPECT_EQ(plan.metadata_bytes, sum_of(plan.metadata_buffers));
  EXPECT_EQ(plan.control_bytes, sum_of(plan.control_buffers));
  EXPECT_EQ(plan.workspace_bytes, sum_of(plan.workspace_buffers));
  EXPECT_EQ(plan.total_activation_bytes, plan.num_slots * plan.slot_bytes);
  EXPECT_EQ(plan.allocated_bytes, plan.total_activation_bytes + plan.device_scratch_bytes +
                                      plan.host_scratch_bytes + plan.communication_bytes +
                                      plan.metadata_bytes + plan.control_bytes +
                                      plan.workspace_bytes);
  for (const std::int64_t bytes :
       {plan.slot_bytes, plan.device_scratch_bytes, plan.host_scratch_bytes,
        plan.minimum_slot_bytes, plan.balanced_slot_bytes, plan.max_useful_slot_bytes}) {
    EXPECT_EQ(bytes % 128, 0);
    EXPECT_GE(bytes, 0);
  }
}

void expect_derived(const Config& config, int ranks, const MemoryPlan& plan) {
  const Derivation page(config, ranks);
  const double device = std::min(config.device_scratch_capacity_factor, double(ranks));
  const double total =
      config.host_scratch
          ? std::min(config.host_scratch->total_scratch_capacity_factor, double(ranks))
          : device;
  const Wide layers = config.max_moe_layers_per_activation_slot;
  const auto is = [](std::int64_t given, Wide expected, const char* what) {
    EXPECT_TRUE(Wide(given) == expected) << what << ": " << given;
  };
  is(plan.balanced_rows, page.T * page.K, "balanced rows");
  is(plan.device_scratch_rows, page.rows(device), "device rows");
  is(plan.total_scratch_rows, page.rows(total), "total rows");
  const Wide device_bytes = page.scratch(page.rows(device));
  is(plan.device_scratch_bytes, device_bytes, "device scratch");
  is(plan.host_scratch_bytes, std::max<Wide>(0, page.scratch(page.rows(total)) - device_bytes),
     "host scratch");
  is(plan.saved_input_bytes_per_layer, dense(page.T, page.D), "saved input");
  is(plan.saved_bytes_per_layer_balanced, page.saved(page.rows(1.0)), "saved balanced");
  const Wide minimum = config.inference ? Wide(0) : up(layers * dense(page.T, page.D));
  const Wide balanced = up(layers * page.saved(page.rows(1.0)));
  is(plan.minimum_slot_bytes, minimum, "minimum slot");
  is(plan.balanced_slot_bytes, balanced, "balanced slot");
  is(plan.max_useful_slot_bytes, up(layers * page.saved(page.rows(total))), "max useful slot");
  Wide slot = minimum;
  if (config.activation_slot_capacity_factor) {
    const auto span = static_cast<double>(balanced - minimum);
    slot =
        up(minimum + static_cast<Wide>(std::ceil(*config.activation_slot_capacity_factor * span)));
  }
  is(plan.slot_bytes, slot, "slot");
  is(plan.num_slots, config.inference ? 0 : config.num_activation_slots, "slots");
}

std::string describe(const Config& c, int ranks) {
  return "T=" + std::to_string(c.max_tokens) + " K=" + std::to_string(c.top_k) +
         " D=" + std::to_string(c.hidden_dim) + " F=" + std::to_string(c.intermediate_dim) +
         " E=" + std::to_string(c.num_experts) + " P=" + std::to_string(ranks) +
         " precision=" + std::to_string(static_cast<int>(c.precision));
}

TEST(MemoryPlanProperty, EqualsTheRederivationForRandomConfigs) {  // reports: A102
  RandomConfig random(20240607);
  int beyond_4_gib = 0;
  for (int i = 0; i < 20000 && !testing::Test::HasFailure(); ++i) {
    const Config config = random.next();
    const int ranks = random.ranks();
    SCOPED_TRACE(describe(config, ranks));
    const MemoryPlan plan = plan_memory(config, ranks);
    expect_derived(config, ranks, plan);
    expect_sections_add_up(plan);
    beyond_4_gib += plan.device_scratch_bytes > (std::int64_t{4} << 30);
  }
  EXPECT_GT(beyond_4_gib, 500);
}

TEST(MemoryPlanProperty, EverythingSavedAtBalancedRoutingFitsTheBalancedSlot) {
  RandomConfig random(7);
  for (int i = 0; i < 3000 && !testing::Test::HasFailure(); ++i) {
    const Config config = random.next();
    if (config.inference) continue;
    const int ranks = random.ranks();
    SCOPED_TRACE(describe(config, ranks));
    const MemoryPlan plan = plan_memory(config, ranks);
    const LayerBytes<> layer{layer_dims(config)};
    const std::int64_t tokens = random.pick(0, config.max_tokens);
    const std::int64_t rows = random.pick(0, config.max_tokens * config.top_k);
    EXPECT_LE(layer.saved(tokens, rows), plan.saved_bytes_per_layer_balanced);
    EXPECT_LE(layer.input(tokens), layer.saved(config.max_tokens, rows));
    EXPECT_LE(plan.minimum_slot_bytes, plan.balanced_slot_bytes);
  }
}

}  // namespace
}  // namespace distmoe
