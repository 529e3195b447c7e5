// SPDX-License-Identifier: Apache-2.0
//
// Invariant: live groups never share a slot, the number of slots is the peak liveness, the ledger
// accepts every step of the schedule, and a malformed schedule is refused with its action.
#include "distmoe/slot_assignment.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>

#include "plan/plan_testing.hpp"
#include "plan/slot_ledger.hpp"

namespace distmoe {
namespace {

constexpr auto F = PipelineActionKind::kForward;
constexpr auto B = PipelineActionKind::kBackward;
constexpr auto I = PipelineActionKind::kBackwardInput;
constexpr auto W = PipelineActionKind::kBackwardWeight;
using Actions = std::vector<PipelineAction>;
using Stages = std::vector<PipelineStage>;

/// 1F1B of pipeline rank `rank` of `ranks`, one stage a rank.
Actions one_f_one_b(std::int64_t rank, std::int64_t ranks, std::int64_t microbatches) {
  Actions actions;
  const std::int64_t warm_up = std::min(ranks - 1 - rank, microbatches);
  for (std::int64_t m = 0; m < warm_up; ++m) actions.push_back({F, rank, m});
  for (std::int64_t m = warm_up; m < microbatches; ++m) {
    actions.push_back({F, rank, m});
    actions.push_back({B, rank, m - warm_up});
  }
  for (std::int64_t m = microbatches - warm_up; m < microbatches; ++m) {
    actions.push_back({B, rank, m});
  }
  return actions;
}

/// Rank 0 of 2 with stages 0 and 2 of 4, four microbatches: the page's interleaved example.
Actions interleaved() {
  return {{F, 0, 0}, {F, 0, 1}, {F, 2, 0}, {F, 2, 1}, {F, 0, 2}, {B, 2, 0}, {F, 0, 3}, {B, 2, 1},
          {F, 2, 2}, {B, 0, 0}, {F, 2, 3}, {B, 0, 1}, {B, 2, 2}, {B, 2, 3}, {B, 0, 2}, {B, 0, 3}};
}

std::vector<std::int64_t> slots_of(const SlotAssignment& assignment) {
  std::vector<std::int64_t> slots;
  slots.reserve(assignment.uses.size());
  for (const SlotUse& use : assignment.uses) slots.push_back(use.slot);
  return slots;
}

/// Runs the schedule on a ledger as a trainer would; errors of the ledger fail the test.
void run_on_ledger(const Actions& actions, const Stages& stages, const SlotAssignment& a) {
  std::map<std::int64_t, std::int64_t> layers;
  for (const PipelineStage& stage : stages) layers[stage.stage] = stage.num_moe_layers;
  SlotLedger ledger(a.num_activation_slots, a.max_moe_layers_per_activation_slot);
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<SlotTicket>> tickets;
  std::int64_t most_in_use = 0;
  for (const PipelineAction& action : actions) {
    auto& live = tickets[{action.stage, action.microbatch}];
    const SlotUse& use = a.use_of(action.stage, action.microbatch);
    if (action.kind == F && layers[action.stage] > 0) {
      ledger.select(use.slot, use.num_moe_layers);
      for (std::int64_t l = 0; l < layers[action.stage]; ++l) live.push_back(ledger.push());
    } else if (action.kind == B || action.kind == W) {
      for (; !live.empty(); live.pop_back()) ledger.pop(live.back());
    }
    std::int64_t in_use = 0;
    for (std::int64_t s = 0; s < a.num_activation_slots; ++s) in_use += ledger.num_live(s) > 0;
    most_in_use = std::max(most_in_use, in_use);
  }
  EXPECT_EQ(most_in_use, a.num_activation_slots);
}

TEST(SlotAssignment, OneFOneBNeedsASlotForEveryMicrobatchInFlight) {
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    const Stages stages = {{rank, 3}};
    const Actions actions = one_f_one_b(rank, 4, 8);
    const SlotAssignment a = assign_activation_slots(actions, stages, 8);
    EXPECT_EQ(a.num_activation_slots, 4 - rank);
    EXPECT_EQ(a.max_moe_layers_per_activation_slot, 3);
    run_on_ledger(actions, stages, a);
  }
  const SlotAssignment a = assign_activation_slots(one_f_one_b(1, 4, 6), Stages{{1, 3}}, 6);
  EXPECT_EQ(slots_of(a), (std::vector<std::int64_t>{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(a.grouping, SlotGrouping::kMicrobatch);
}

TEST(SlotAssignment, InterleavedTakesTheGroupingWithFewerBytes) {
  const Stages even = {{0, 2}, {2, 2}};
  const SlotAssignment by_stage = assign_activation_slots(interleaved(), even, 4);
  EXPECT_EQ(by_stage.grouping, SlotGrouping::kStageMicrobatch);
  EXPECT_EQ(by_stage.num_activation_slots, 5);
  EXPECT_EQ(by_stage.max_moe_layers_per_activation_slot, 2);
  EXPECT_EQ(slots_of(by_stage), (std::vector<std::int64_t>{0, 1, 2, 3, 4, 2, 3, 0}));
  run_on_ledger(interleaved(), even, by_stage);

  const SlotAssignment forced =
      assign_activation_slots(interleaved(), even, 4, SlotGrouping::kMicrobatch);
  EXPECT_EQ(forced.num_activation_slots, 4);
  EXPECT_EQ(forced.max_moe_layers_per_activation_slot, 4);
  EXPECT_EQ(slots_of(forced), (std::vector<std::int64_t>{0, 1, 0, 1, 2, 3, 2, 3}));
  run_on_ledger(interleaved(), even, forced);

  const Stages uneven = {{0, 1}, {2, 6}};  // 4 slots of 7 layers against 5 of 6
  const SlotAssignment by_microbatch = assign_activation_slots(interleaved(), uneven, 4);
  EXPECT_EQ(by_microbatch.grouping, SlotGrouping::kMicrobatch);
  EXPECT_EQ(by_microbatch.max_moe_layers_per_activation_slot, 7);
  run_on_ledger(interleaved(), uneven, by_microbatch);
}

TEST(SlotAssignment, SplitBackwardHoldsTheSlotUntilTheWeights) {
  const Actions actions = {{F, 0, 0}, {I, 0, 0}, {F, 0, 1}, {W, 0, 0}, {F, 0, 2},
                           {I, 0, 1}, {I, 0, 2}, {W, 0, 1}, {W, 0, 2}};
  const SlotAssignment a = assign_activation_slots(actions, Stages{{0, 1}}, 3);
  EXPECT_EQ(a.num_activation_slots, 2);
  EXPECT_EQ(slots_of(a), (std::vector<std::int64_t>{0, 1, 0}));
  run_on_ledger(actions, Stages{{0, 1}}, a);
}

TEST(SlotAssignment, AMicrobatchSlotIsAStack) {
  // The weights of stage 0 come before those of stage 1, whose forward was later.
  const Actions actions = {{F, 0, 0}, {F, 1, 0}, {I, 1, 0}, {I, 0, 0}, {W, 0, 0}, {W, 1, 0}};
  const Stages stages = {{0, 1}, {1, 9}};
  expect_error(
      ErrorCode::kInvalidArgument,
      [&] { assign_activation_slots(actions, stages, 1, SlotGrouping::kMicrobatch); },
      "action 4 (backward of the weights of stage 0, microbatch 0)", "a slot is a stack");
  const SlotAssignment a = assign_activation_slots(actions, stages, 1);
  EXPECT_EQ(a.grouping, SlotGrouping::kStageMicrobatch);
  run_on_ledger(actions, stages, a);
}

TEST(SlotAssignment, AStageWithoutExpertsNeedsNoSlot) {
  const Actions actions = {{F, 0, 0}, {F, 3, 0}, {B, 3, 0}, {B, 0, 0}};
  const Stages stages = {{0, 0}, {3, 2}};
  const SlotAssignment a = assign_activation_slots(actions, stages, 1);
  EXPECT_EQ(a.num_activation_slots, 1);
  EXPECT_EQ(a.use_of(0, 0), (SlotUse{0, 0, -1, 0}));
  EXPECT_EQ(a.use_of(3, 0), (SlotUse{3, 0, 0, 2}));
  run_on_ledger(actions, stages, a);
  expect_error(
      ErrorCode::kInvalidArgument, [&] { a.use_of(1, 0); }, "stage 1, microbatch 0",
      "not in the schedule");
}

template <typename... Words>
void expect_refused(const Actions& actions, const Words&... words) {
  expect_error(
      ErrorCode::kInvalidArgument,
      [&] {
        assign_activation_slots(actions, Stages{{0, 1}, {1, 1}}, 1);
      },
      words...);
}

TEST(SlotAssignment, RefusesUnknownActions) {
  expect_refused({{F, 7, 0}}, "action 0 (forward of stage 7, microbatch 0)",
                 "not one of this rank");
  expect_refused({{F, 0, 0}, {F, 0, 1}}, "action 1 (forward of stage 0, microbatch 1)", "0 to 0");
  expect_refused({{F, 0, -1}}, "microbatch -1");
  expect_refused({{static_cast<PipelineActionKind>(9), 0, 0}}, "action 0", "kind 9 is unknown");
}

TEST(SlotAssignment, RefusesDuplicates) {
  expect_refused({{F, 0, 0}, {F, 0, 0}}, "action 1 (forward of stage 0", "duplicate");
  expect_refused({{F, 0, 0}, {B, 0, 0}, {B, 0, 0}}, "action 2 (backward of stage 0", "duplicate");
  expect_refused({{F, 0, 0}, {I, 0, 0}, {I, 0, 0}}, "action 2", "duplicate");
  expect_refused({{F, 0, 0}, {I, 0, 0}, {W, 0, 0}, {W, 0, 0}}, "action 3", "duplicate");
  expect_refused({{F, 0, 0}, {B, 0, 0}, {F, 0, 0}}, "action 2 (forward", "duplicate");
}

TEST(SlotAssignment, RefusesMissingActions) {
  expect_refused({{B, 0, 0}}, "action 0 (backward of stage 0", "forward is missing");
  expect_refused({{F, 0, 0}, {W, 0, 0}}, "action 1 (backward of the weights",
                 "backward of the input is missing");
  expect_refused({{F, 0, 0}, {F, 1, 0}, {B, 1, 0}}, "action 0 (forward of stage 0",
                 "its backward is missing");
  expect_refused({{F, 0, 0}, {F, 1, 0}, {B, 1, 0}, {I, 0, 0}},
                 "action 3 (backward of the input of stage 0",
                 "backward of the weights is missing");
  expect_refused({{F, 0, 0}, {B, 0, 0}}, "stage 1, microbatch 0: the forward is missing");
}

TEST(SlotAssignment, RefusesBothFormsOfABackward) {
  expect_refused({{F, 0, 0}, {B, 0, 0}, {I, 0, 0}}, "action 2", "full and a split backward");
  expect_refused({{F, 0, 0}, {I, 0, 0}, {B, 0, 0}}, "action 2", "full and a split backward");
}

TEST(SlotAssignment, RefusesBrokenStagesAndMicrobatches) {
  const auto refused = [](const Stages& stages, std::int64_t microbatches, const char* words) {
    expect_error(
        ErrorCode::kInvalidArgument,
        [&] { assign_activation_slots(Actions{}, stages, microbatches); }, words);
  };
  refused({}, 1, "no stages");
  refused({{4, -1}}, 1, "stage 4 has -1 MoE layers");
  refused({{4, 1}, {4, 2}}, 1, "stage 4 is given twice");
  refused({{4, 1}}, 0, "num_microbatches is 0");
}

TEST(SlotAssignment, AutoTakesTheGroupingThatFitsInSixtyFourBits) {
  constexpr std::int64_t kHalf = std::int64_t{1} << 62;
  const Actions nested = {{F, 0, 0}, {F, 1, 0}, {B, 1, 0}, {B, 0, 0}};
  // 1 slot of 2^62 + 1 layers against 2 of 2^62.
  const SlotAssignment deep = assign_activation_slots(nested, Stages{{0, 1}, {1, kHalf}}, 1);
  EXPECT_EQ(deep.grouping, SlotGrouping::kMicrobatch);
  EXPECT_EQ(deep.max_moe_layers_per_activation_slot, kHalf + 1);
  // 2 slots of 2^62 layers against 2 of 2^61.
  const Actions overlapping = {{F, 0, 0}, {F, 1, 0}, {B, 1, 0}, {F, 0, 1},
                               {B, 0, 0}, {F, 1, 1}, {B, 1, 1}, {B, 0, 1}};
  const SlotAssignment flat =
      assign_activation_slots(overlapping, Stages{{0, kHalf / 2}, {1, kHalf / 2}}, 2);
  EXPECT_EQ(flat.grouping, SlotGrouping::kStageMicrobatch);
  EXPECT_EQ(flat.num_activation_slots, 2);
  expect_error(
      ErrorCode::kInvalidArgument,
      [&] {
        assign_activation_slots(overlapping, Stages{{0, kHalf}, {1, 1}}, 2);
      },
      "64 bits", "by microbatch");
}

TEST(SlotAssignment, EveryGroupingRefusesWhatLeavesSixtyFourBits) {
  constexpr std::int64_t kHalf = std::int64_t{1} << 62;
  const auto refused = [](const Actions& actions, const Stages& stages, SlotGrouping grouping,
                          const char* words) {
    expect_error(
        ErrorCode::kInvalidArgument,
        [&] { assign_activation_slots(actions, stages, actions.back().microbatch + 1, grouping); },
        "64 bits", words);
  };
  const Actions overlapping = {{F, 0, 0}, {F, 1, 0}, {B, 1, 0}, {F, 0, 1},
                               {B, 0, 0}, {F, 1, 1}, {B, 1, 1}, {B, 0, 1}};
  refused(overlapping, {{0, kHalf}, {1, 1}}, SlotGrouping::kStageMicrobatch,
          "2 x 4611686018427387904 by stage and microbatch");
  refused(overlapping, {{0, kHalf}, {1, 1}}, SlotGrouping::kMicrobatch,
          "2 x 4611686018427387905 by microbatch");
  // No stack: the automatic choice has one grouping left.
  const Actions crossing = {{F, 0, 0}, {F, 1, 0}, {B, 0, 0}, {B, 1, 0}};
  refused(crossing, {{0, kHalf}, {1, 1}}, SlotGrouping::kAuto, "by stage and microbatch");
  // One layer less fits.
  const SlotAssignment most = assign_activation_slots(overlapping, Stages{{0, kHalf - 1}, {1, 1}},
                                                      2, SlotGrouping::kStageMicrobatch);
  EXPECT_EQ(most.max_moe_layers_per_activation_slot, kHalf - 1);
  EXPECT_EQ(most.num_activation_slots, 2);
}

TEST(SlotAssignment, WithoutMoeLayersThereIsNoSlot) {
  const SlotAssignment a =
      assign_activation_slots(Actions{{F, 0, 0}, {B, 0, 0}}, Stages{{0, 0}}, 1);
  EXPECT_EQ(a.num_activation_slots, 0);
  EXPECT_EQ(a.max_moe_layers_per_activation_slot, 0);
}

TEST(SlotAssignment, RefusesAnUnknownGrouping) {
  expect_error(
      ErrorCode::kInvalidArgument,
      [] {
        assign_activation_slots(Actions{{F, 0, 0}, {B, 0, 0}}, Stages{{0, 1}}, 1, SlotGrouping(7));
      },
      "grouping is 7", "auto, microbatch, stage_microbatch");
}

TEST(SlotAssignment, RandomSchedulesRunOnTheirSlots) {
  std::mt19937 random(5);
  const auto pick = [&](int least, int most) {
    return std::uniform_int_distribution<>(least, most)(random);
  };
  for (int i = 0; i < 400 && !testing::Test::HasFailure(); ++i) {
    const int num_stages = pick(1, 3);
    const int microbatches = pick(1, 6);
    Stages stages;
    for (int s = 0; s < num_stages; ++s) stages.push_back({s * 5, pick(0, 4)});
    // Every microbatch walks up its stages and down again; the order across microbatches is random.
    std::vector<int> progress(static_cast<std::size_t>(microbatches), 0);
    Actions actions;
    while (std::ssize(actions) < 2 * num_stages * microbatches) {
      const int m = pick(0, microbatches - 1);
      int& step = progress[static_cast<std::size_t>(m)];
      if (step == 2 * num_stages) continue;
      const bool up = step < num_stages;
      actions.push_back({up ? F : B, 5 * (up ? step : 2 * num_stages - 1 - step), m});
      ++step;
    }
    for (const SlotGrouping grouping :
         {SlotGrouping::kAuto, SlotGrouping::kMicrobatch, SlotGrouping::kStageMicrobatch}) {
      run_on_ledger(actions, stages,
                    assign_activation_slots(actions, stages, microbatches, grouping));
    }
  }
}

}  // namespace
}  // namespace distmoe
