// SPDX-License-Identifier: Apache-2.0
//
// Invariant: deciding, rewinding, selecting and resetting allocate nothing; all memory of the
// slots' state is taken when they are made.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>
#include <vector>

#include "plan/plan_testing.hpp"
#include "plan/rank_slots.hpp"

namespace {
std::size_t num_allocations = 0;
}

// NOTE: where g++ 12 inlines one of a pair alone it takes them for mismatched.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++num_allocations;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace distmoe {
namespace {

TEST(SlotAllocation, DecisionsAllocateNothing) {
  Config config = small_config();
  config.max_moe_layers_per_activation_slot = 4;
  config.num_activation_slots = 3;
  config.activation_slot_capacity_factor = 0.5;
  RankSlots slots(config, plan_memory(config, 3), 3, 1);
  const std::vector<std::int64_t> tokens = {64, 0, 31};
  const std::vector<std::int64_t> rows = {150, 192, 7};
  std::vector<LiveForward> live(12);
  const std::size_t before = num_allocations;
  for (int step = 0; step < 2; ++step) {
    for (std::size_t i = 0; i < live.size(); ++i) {
      slots.select(static_cast<std::int64_t>(i / 4), 4);
      live[i] = slots.push(tokens, rows);
    }
    for (std::size_t i = live.size(); i-- > 0;) slots.pop(live[i]);
  }
  slots.reset();
  EXPECT_EQ(num_allocations, before);
  EXPECT_GT(before, 0u);  // the counter counts
}

}  // namespace
}  // namespace distmoe
