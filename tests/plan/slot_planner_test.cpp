// SPDX-License-Identifier: Apache-2.0
//
// Invariant: over any order of forwards and backwards on any slots, with any tokens and rows per
// rank, all ranks decide alike, no rank's slot exceeds its bytes, and the state returns to its
// start.
#include "plan/slot_planner.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "plan/plan_testing.hpp"
#include "plan/rank_slots.hpp"

namespace distmoe {
namespace {

struct Group {
  std::vector<RankSlots> ranks;
  MemoryPlan plan;

  Group(const Config& config, int ep_size) : plan(plan_memory(config, ep_size)) {
    for (int rank = 0; rank < ep_size; ++rank) ranks.emplace_back(config, plan, ep_size, rank);
  }
  std::vector<LiveForward> push(const std::vector<std::int64_t>& tokens,
                                const std::vector<std::int64_t>& rows) {
    std::vector<LiveForward> forwards;
    forwards.reserve(ranks.size());
    for (RankSlots& slots : ranks) forwards.push_back(slots.push(tokens, rows));
    return forwards;
  }
  void pop(const std::vector<LiveForward>& forwards) {
    for (std::size_t r = 0; r < ranks.size(); ++r) ranks[r].pop(forwards[r]);
  }
  void select(std::int64_t slot, std::int64_t layers) {
    for (RankSlots& slots : ranks) slots.select(slot, layers);
  }
};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  std::int64_t pick(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(engine_);
  }
  double real(double most) { return std::uniform_real_distribution<double>(0.0, most)(engine_); }

  Config config() {
    Config config = small_config();
    config.max_tokens = pick(1, 100);
    config.hidden_dim = 32 * pick(1, 4);
    config.intermediate_dim = 32 * pick(1, 8);
    config.max_moe_layers_per_activation_slot = pick(1, 6);
    config.num_activation_slots = pick(1, 4);
    config.activation_slot_capacity_factor = real(1.6);
    config.device_scratch_capacity_factor = 8.0;
    if (pick(0, 2) == 0) config.precision = Precision::kMXFP8;
    if (config.precision == Precision::kBF16 && pick(0, 2) == 0) {
      config.activation_policy = ActivationPolicy::kLean;
    }
    return config;
  }

 private:
  std::mt19937_64 engine_;
};

/// The decision as the page writes it, for the P values of `saved`.
bool page_recomputes(const Config& config, std::int64_t slot_bytes, std::int64_t after,
                     const std::vector<std::int64_t>& saved,
                     const std::vector<std::int64_t>& tokens,
                     const std::vector<std::int64_t>& rows) {
  const LayerBytes<> layer{layer_dims(config)};
  std::int64_t worst = 0;
  for (std::size_t r = 0; r < saved.size(); ++r) {
    worst = std::max(worst, saved[r] + layer.saved(tokens[r], rows[r]));
  }
  return worst + after * align_up(2 * config.max_tokens * config.hidden_dim) > slot_bytes;
}

struct Live {
  std::vector<LiveForward> forwards;
  std::vector<std::int64_t> used_before;
};

class Walk {
 public:
  Walk(Random& random, const Config& config, int ep_size)
      : random_(random), config_(config), group_(config, ep_size), stacks_(slots()) {}

  void run(int steps) {
    for (int i = 0; i < steps && !testing::Test::HasFailure(); ++i) step();
    for (auto& stack : stacks_) {
      while (!stack.empty()) backward(stack);
    }
    for (RankSlots& rank : group_.ranks) {
      for (std::int64_t slot = 0; slot < config_.num_activation_slots; ++slot) {
        EXPECT_EQ(rank.used_bytes(slot), 0);
        EXPECT_EQ(rank.ledger().num_live(slot), 0);
      }
    }
  }
  int num_saved = 0;
  int num_recomputed = 0;

 private:
  std::size_t slots() const { return static_cast<std::size_t>(config_.num_activation_slots); }

  void step() {
    const std::int64_t slot = random_.pick(0, config_.num_activation_slots - 1);
    auto& stack = stacks_[static_cast<std::size_t>(slot)];
    const std::int64_t layers = config_.max_moe_layers_per_activation_slot;
    const bool is_full = std::ssize(stack) == group_.ranks[0].ledger().slot_layers(slot);
    if (!stack.empty() && (is_full || random_.pick(0, 2) == 0)) return backward(stack);
    group_.select(
        slot, stack.empty() ? random_.pick(1, layers) : group_.ranks[0].ledger().slot_layers(slot));
    forward(slot, stack);
  }

  void forward(std::int64_t slot, std::vector<Live>& stack) {
    const std::size_t ep_size = group_.ranks.size();
    std::vector<std::int64_t> tokens(ep_size);
    std::vector<std::int64_t> rows(ep_size);
    Live live;
    for (std::size_t r = 0; r < ep_size; ++r) {
      tokens[r] = random_.pick(0, config_.max_tokens);
      rows[r] = random_.pick(0, group_.plan.total_scratch_rows);
      live.used_before.push_back(group_.ranks[r].used_bytes(slot));
    }
    const std::int64_t after = group_.ranks[0].ledger().slot_layers(slot) - 1 - std::ssize(stack);
    const bool expected =
        page_recomputes(config_, group_.plan.slot_bytes, after, live.used_before, tokens, rows);
    live.forwards = group_.push(tokens, rows);
    for (std::size_t r = 0; r < ep_size; ++r) {
      const LiveForward& forward = live.forwards[r];
      EXPECT_EQ(forward.saved.is_recomputed, expected) << "rank " << r;
      EXPECT_EQ(forward.saved.slot, slot);
      EXPECT_EQ(forward.saved.offset, live.used_before[r]);
      const LayerBytes<> layer{layer_dims(config_)};
      EXPECT_EQ(forward.saved.bytes,
                expected ? layer.input(tokens[r]) : layer.saved(tokens[r], rows[r]));
      EXPECT_LE(group_.ranks[r].used_bytes(slot) + after * layer.input(config_.max_tokens),
                group_.plan.slot_bytes);
      EXPECT_GE(group_.ranks[r].peak_bytes(slot), group_.ranks[r].used_bytes(slot));
      EXPECT_LE(group_.ranks[r].peak_bytes(slot), group_.plan.slot_bytes);
    }
    ++(expected ? num_recomputed : num_saved);
    stack.push_back(std::move(live));
  }

  void backward(std::vector<Live>& stack) {
    const Live live = stack.back();
    stack.pop_back();
    group_.pop(live.forwards);
    for (std::size_t r = 0; r < group_.ranks.size(); ++r) {
      EXPECT_EQ(group_.ranks[r].used_bytes(live.forwards[r].saved.slot), live.used_before[r]);
    }
  }

  Random& random_;
  Config config_;
  Group group_;
  std::vector<std::vector<Live>> stacks_;
};

TEST(SlotPlanner, RanksAgreeStayInBoundsAndReturnToTheStart) {
  Random random(31);
  int saved = 0;
  int recomputed = 0;
  for (int i = 0; i < 800 && !testing::Test::HasFailure(); ++i) {
    Walk walk(random, random.config(), static_cast<int>(random.pick(1, 5)));
    walk.run(60);
    saved += walk.num_saved;
    recomputed += walk.num_recomputed;
  }
  EXPECT_GT(saved, 3000);
  EXPECT_GT(recomputed, 3000);
}

TEST(SlotPlanner, BalancedSlotSavesBalancedRoutingWhole) {
  Random random(32);
  for (int i = 0; i < 300; ++i) {
    Config config = random.config();
    config.activation_slot_capacity_factor = 1.0;
    const int ep_size = static_cast<int>(random.pick(1, 5));
    Group group(config, ep_size);
    const auto ranks = static_cast<std::size_t>(ep_size);
    const std::vector<std::int64_t> tokens(ranks, config.max_tokens);
    // Balanced rows with the padding of the worst spread over experts.
    const std::int64_t experts = ceil_div(config.num_experts, ep_size);
    std::int64_t balanced = config.max_tokens * config.top_k;
    if (config.precision == Precision::kMXFP8) balanced = (balanced + experts * 127) / 128 * 128;
    for (std::int64_t layer = 0; layer < config.max_moe_layers_per_activation_slot; ++layer) {
      for (const LiveForward& forward :
           group.push(tokens, std::vector<std::int64_t>(ranks, balanced))) {
        ASSERT_FALSE(forward.saved.is_recomputed) << "layer " << layer;
      }
    }
  }
}

TEST(SlotPlanner, MinimumSlotRecomputesEveryFullLayer) {
  Config config = small_config();
  Group group(config, 3);
  for (int layer = 0; layer < 2; ++layer) {
    for (const LiveForward& forward : group.push({64, 64, 64}, {192, 192, 192})) {
      EXPECT_TRUE(forward.saved.is_recomputed);
      EXPECT_EQ(forward.saved.bytes, 64 * 96 * 2);
    }
  }
}

TEST(SlotPlanner, OneOverloadedRankMakesAllRanksRecompute) {
  Config config = small_config();
  config.max_moe_layers_per_activation_slot = 1;
  config.activation_slot_capacity_factor = 1.0;
  Group group(config, 3);
  const auto balanced = group.push({64, 64, 64}, {192, 192, 192});
  for (const LiveForward& forward : balanced) EXPECT_FALSE(forward.saved.is_recomputed);
  group.pop(balanced);
  for (const LiveForward& forward : group.push({0, 64, 7}, {1, 193, 0})) {
    EXPECT_TRUE(forward.saved.is_recomputed);
  }
}

TEST(SlotPlanner, AFailedCallTakesAndGivesNothing) {
  Config config = small_config();
  const MemoryPlan plan = plan_memory(config, 1);
  const SlotLimits limits{layer_dims(config), config.max_tokens, plan.slot_bytes, 1, 0};
  SlotState state{4096, 1, 4096};
  std::int64_t saved = 4096;
  const std::int64_t before = 0;
  EXPECT_EQ(pop_layer(limits, SavedLayer{}, &before, {&state, &saved}), SlotStep::kDone);
  EXPECT_EQ(state.cursor, 4096);
  EXPECT_EQ(saved, 4096);
}

TEST(SlotPlanner, RefusedTransitionsWriteNothing) {
  Config config = small_config();
  const MemoryPlan plan = plan_memory(config, 1);
  const SlotLimits limits{layer_dims(config), config.max_tokens, plan.slot_bytes, 1, 0};
  SlotState state{4096, 2, 4096};
  std::int64_t saved = 4096;
  std::int64_t before = -7;
  const std::int64_t tokens = 5;
  const std::int64_t rows = 9;
  SavedLayer out;
  EXPECT_EQ(push_layer(limits, 2, {&tokens, &rows}, {&state, &saved}, &before, out),
            SlotStep::kSlotFull);
  EXPECT_EQ(before, -7);
  EXPECT_FALSE(out.is_live);
  const SavedLayer bottom{0, 0, 0, 4096, false, true};
  EXPECT_EQ(pop_layer(limits, bottom, &before, {&state, &saved}), SlotStep::kNotTop);
  EXPECT_EQ(saved, 4096);
  EXPECT_EQ(state.cursor, 4096);
  EXPECT_EQ(state.live_layers, 2);
}

}  // namespace
}  // namespace distmoe
