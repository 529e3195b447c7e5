// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a context maps exactly the bytes of its plan, once, and unmaps them when it is closed.
// The test counts what the library asks of the system.
#include "backend/cpu/context_memory.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>

#include "distmoe/context.hpp"
#include "plan/plan_testing.hpp"

namespace {
std::int64_t mapped_bytes = 0;
}

extern "C" void* mmap(void* address, std::size_t length, int protection, int flags, int file,
                      off_t offset) noexcept {
  mapped_bytes += static_cast<std::int64_t>(length);
  return std::bit_cast<void*>(syscall(SYS_mmap, address, length, protection, flags, file, offset));
}

extern "C" int munmap(void* address, std::size_t length) noexcept {
  mapped_bytes -= static_cast<std::int64_t>(length);
  return static_cast<int>(syscall(SYS_munmap, address, length));
}

namespace distmoe {
namespace {

TEST(ContextMemory, MapsItsPlanToTheByteAndGivesItBack) {
  for (const bool inference : {true, false}) {
    for (const std::int64_t tokens : {1, 63, 1000}) {
      for (const std::optional<double> slot_factor :
           {std::optional<double>(), std::optional(0.7)}) {
        Config config = small_config();
        config.max_tokens = tokens;
        config.inference = inference;
        config.num_activation_slots = 3;
        if (!inference) config.activation_slot_capacity_factor = slot_factor;
        const MemoryPlan plan = plan_memory(config, 1);
        const std::int64_t before = mapped_bytes;
        Context context = Context::create(config, {.num_threads = 1});
        EXPECT_EQ(mapped_bytes - before, plan.allocated_bytes);
        EXPECT_EQ(context.allocated_bytes(), plan.allocated_bytes);
        context.close();
        EXPECT_EQ(mapped_bytes, before);
      }
    }
  }
}

}  // namespace
}  // namespace distmoe
