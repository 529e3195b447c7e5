// SPDX-License-Identifier: Apache-2.0
// Invariant: only features that the system lists as enabled are reported, whole words, in one
// order.
#include "machine.hpp"

#include <gtest/gtest.h>

namespace distmoe::tools {
namespace {

using Features = std::vector<std::string>;

TEST(SimdFeatures, TakesWholeWordsOfTheFirstFlagsLine) {
  EXPECT_EQ(simd_features("processor\t: 0\nflags\t\t: fpu avx512f avx2 avx512_bf16 amx_tiles\n"
                          "flags\t\t: fma\n"),
            (Features{"avx2", "avx512f", "avx512_bf16"}));
}

TEST(SimdFeatures, IgnoresOtherLinesThatMentionFlags) {
  EXPECT_EQ(simd_features("vmx flags\t: avx2\nflags_of_x : avx\nflags\t:fma\n"), (Features{"fma"}));
}

TEST(SimdFeatures, ReadsArmAndNothing) {
  EXPECT_EQ(simd_features("Features\t: fp asimd bf16 sve"), (Features{"asimd", "sve", "bf16"}));
  EXPECT_TRUE(simd_features("").empty());
  EXPECT_TRUE(simd_features("flags :").empty());
}

TEST(Machine, HasCores) {
  const Machine machine = inspect_machine();
  EXPECT_GE(machine.usable_cores, 1);
  EXPECT_GE(machine.cores, machine.usable_cores);
  EXPECT_GT(machine.memory_bytes, 0);
}

}  // namespace
}  // namespace distmoe::tools
