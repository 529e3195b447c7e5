// SPDX-License-Identifier: Apache-2.0
//
// Invariant: while a DefaultFloatEnvironment lives, arithmetic rounds to nearest and keeps
// subnormals, whatever the thread had set; afterwards the thread has that again.
#include "core/float_environment.hpp"

#include <gtest/gtest.h>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace distmoe {
namespace {

/// Computed when the test runs.
float third() {
  volatile float one = 1.0F;
  volatile float three = 3.0F;
  return one / three;
}

TEST(FloatEnvironmentTest, RoundsToNearestAndGivesTheCallersDirectionBack) {
  const float nearest = third();
  ASSERT_EQ(std::fesetround(FE_DOWNWARD), 0);
  const float down = third();
  float within = 0.0F;
  {
    const DefaultFloatEnvironment environment;
    within = third();
  }
  const int direction = std::fegetround();
  std::fesetround(FE_TONEAREST);
  EXPECT_LT(down, nearest);
  EXPECT_EQ(within, nearest);
  EXPECT_EQ(direction, FE_DOWNWARD);
}

#if defined(__SSE2__)
TEST(FloatEnvironmentTest, KeepsSubnormalsAndGivesTheCallersFlushingBack) {
  constexpr unsigned kFlushes = 0x8040;  // FTZ and DAZ
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | kFlushes);
  const auto product = [] {
    volatile float smallest = 0x1p-149F;
    volatile float two = 2.0F;
    return smallest * two;
  };
  const float flushed = product();
  float kept = 0.0F;
  {
    const DefaultFloatEnvironment environment;
    kept = product();
  }
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(flushed, 0.0F);
  EXPECT_EQ(kept, 0x1p-148F);
  EXPECT_EQ(after & kFlushes, kFlushes);
}
#endif

}  // namespace
}  // namespace distmoe
