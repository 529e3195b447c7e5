// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a wrong selection, forward or backward is an error that names slot, layer and what is
// legal, and leaves the slots as they were; reset() brings them back from anything.
#include "plan/slot_ledger.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "plan/plan_testing.hpp"
#include "plan/rank_slots.hpp"

namespace distmoe {
namespace {

constexpr auto kInvalid = ErrorCode::kInvalidArgument;

TEST(SlotLedger, StartsWithSlotZeroAtFullDepth) {
  SlotLedger ledger(2, 3);
  EXPECT_EQ(ledger.selected_slot(), 0);
  EXPECT_EQ(ledger.slot_layers(0), 3);
  for (int layer = 0; layer < 3; ++layer) EXPECT_EQ(ledger.push().layer, layer);
  EXPECT_EQ(ledger.num_live(0), 3);
}

TEST(SlotLedger, RefusesUnknownSlotsAndDepths) {
  SlotLedger ledger(2, 3);
  ledger.select(1, 2);
  for (const std::int64_t slot : {-1, 2}) {
    expect_error(
        kInvalid, [&] { ledger.select(slot, 1); },
        "activation slot " + std::to_string(slot) + " does not exist", "0 to 1");
  }
  for (const std::int64_t depth : {0, -2, 4}) {
    expect_error(
        kInvalid, [&] { ledger.select(0, depth); },
        "num_moe_layers of activation slot 0 is " + std::to_string(depth),
        "1 to max_moe_layers_per_activation_slot, which is 3");
  }
  EXPECT_EQ(ledger.selected_slot(), 1);
  EXPECT_EQ(ledger.slot_layers(1), 2);
  EXPECT_EQ(ledger.slot_layers(0), 3);
}

TEST(SlotLedger, RefusesAForwardBeyondTheSelectedDepth) {
  SlotLedger ledger(2, 3);
  ledger.select(1, 1);
  ledger.push();
  expect_error(
      kInvalid, [&] { ledger.push(); }, "activation slot 1 holds 1 forward(s)", "selected for 1");
  EXPECT_EQ(ledger.num_live(1), 1);
  ledger.select(0, 3);
  EXPECT_EQ(ledger.push().slot, 0);
}

TEST(SlotLedger, DepthOfASlotInUseMayShrinkButNotGrow) {
  SlotLedger ledger(1, 4);
  ledger.select(0, 3);
  const SlotTicket first = ledger.push();
  expect_error(
      kInvalid, [&] { ledger.select(0, 4); }, "is 4", "1 forward(s) wait", "legal is 1 to 3");
  ledger.select(0, 2);
  ledger.push();
  expect_error(
      kInvalid, [&] { ledger.select(0, 1); }, "2 forward(s) wait", "legal is 2 to 2");
  EXPECT_EQ(first.slot_layers, 3);
  EXPECT_EQ(ledger.slot_layers(0), 2);
}

TEST(SlotLedger, BackwardFollowsTheStackOfItsOwnSlot) {
  SlotLedger ledger(2, 3);
  const SlotTicket bottom = ledger.push();
  const SlotTicket top = ledger.push();
  ledger.select(1, 3);
  const SlotTicket other = ledger.push();
  expect_error(
      kInvalid, [&] { ledger.pop(bottom); }, "layer 0 in activation slot 0 is not the last one",
      "layer 1 waits");
  EXPECT_EQ(ledger.num_live(0), 2);
  ledger.pop(top);  // another slot is selected: nothing changes for this forward
  expect_error(
      kInvalid, [&] { ledger.pop(top); }, "had its backward already");
  ledger.pop(other);
  ledger.pop(bottom);
  EXPECT_EQ(ledger.num_live(0) + ledger.num_live(1), 0);
}

TEST(SlotLedger, AnAbandonedForwardNeedsAResetAndSaysWhy) {
  SlotLedger ledger(2, 3);
  const SlotTicket bottom = ledger.push();
  const SlotTicket lost = ledger.push();
  ledger.abandon(lost);
  for (int i = 0; i < 2; ++i) {
    expect_error(
        kInvalid, [&] { ledger.push(); }, "activation slot 0 needs reset()",
        "its layer 1 was destroyed before its backward");
  }
  expect_error(
      kInvalid, [&] { ledger.pop(bottom); }, "needs reset()");
  ledger.select(1, 1);
  ledger.pop(ledger.push());
  ledger.reset();
  EXPECT_EQ(ledger.selected_slot(), 0);
  EXPECT_EQ(ledger.slot_layers(1), 3);
  ledger.push();
  expect_error(
      kInvalid, [&] { ledger.pop(bottom); }, "from before a reset()");
  ledger.abandon(bottom);  // stale: the slot stays usable
  EXPECT_NO_THROW(ledger.push());
}

TEST(SlotLedger, AFinishedForwardCanBeDestroyed) {
  SlotLedger ledger(1, 1);
  const SlotTicket ticket = ledger.push();
  ledger.pop(ticket);
  ledger.abandon(ticket);
  EXPECT_NO_THROW(ledger.push());
}

TEST(SlotLedger, InferenceSelectsNothingAndSavesNothing) {
  SlotLedger ledger(0, 3);
  EXPECT_NO_THROW(ledger.select(7, 99));
  expect_error(
      kInvalid, [&] { ledger.push(); }, "no activation slots");
}

TEST(SlotLedger, ABackwardTakesTheSameTimeHoweverDeepItsSlot) {
  constexpr std::int64_t kLayers = 1 << 19;
  SlotLedger ledger(1, kLayers);
  std::vector<SlotTicket> tickets;
  tickets.reserve(kLayers);
  for (std::int64_t i = 0; i < kLayers; ++i) tickets.push_back(ledger.push());
  // From the bottom of the slot these were 2^37 comparisons, past the time limit of a test.
  for (; !tickets.empty(); tickets.pop_back()) ledger.pop(tickets.back());
  EXPECT_EQ(ledger.num_live(0), 0);
}

TEST(RankSlots, ErrorsLeaveTheBytesAsTheyWere) {
  Config config = small_config();
  config.num_activation_slots = 2;
  RankSlots slots(config, plan_memory(config, 2), 2, 1);
  const std::vector<std::int64_t> tokens = {11, 23};
  const std::vector<std::int64_t> rows = {5, 97};
  const LiveForward first = slots.push(tokens, rows);
  const LiveForward second = slots.push(tokens, rows);
  const std::int64_t used = slots.used_bytes(0);
  EXPECT_GT(used, 0);
  expect_error(
      kInvalid, [&] { slots.push(tokens, rows); }, "holds 2 forward(s)");
  expect_error(
      kInvalid, [&] { slots.pop(first); }, "is not the last one");
  expect_error(
      kInvalid, [&] { slots.select(2, 1); }, "does not exist");
  EXPECT_EQ(slots.used_bytes(0), used);
  EXPECT_EQ(slots.slot_offset(1), plan_memory(config, 2).slot_bytes);
  slots.pop(second);
  slots.pop(first);
  EXPECT_EQ(slots.used_bytes(0), 0);
  EXPECT_EQ(slots.peak_bytes(0), used);
}

TEST(RankSlots, ResetEmptiesWhatAnAbortedScheduleLeft) {
  Config config = small_config();
  config.num_activation_slots = 2;
  RankSlots slots(config, plan_memory(config, 1), 1, 0);
  const std::vector<std::int64_t> tokens = {64};
  const std::vector<std::int64_t> rows = {100};
  slots.select(1, 2);
  slots.abandon(slots.push(tokens, rows));
  slots.reset();
  EXPECT_EQ(slots.used_bytes(1), 0);
  EXPECT_EQ(slots.peak_bytes(1), 0);
  EXPECT_EQ(slots.push(tokens, rows).ticket.slot, 0);
}

}  // namespace
}  // namespace distmoe
