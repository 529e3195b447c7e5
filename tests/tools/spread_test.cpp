// SPDX-License-Identifier: Apache-2.0
// Invariant: percentiles are those of the sorted samples, linear between two of them.
#include "bench/spread.hpp"

#include <gtest/gtest.h>

namespace distmoe::tools {
namespace {

TEST(Spread, IsReadOffTheSortedSamples) {
  const Spread spread = spread_of({11, 1, 10, 2, 9, 3, 8, 4, 7, 5, 6});
  EXPECT_DOUBLE_EQ(spread.median, 6);
  EXPECT_DOUBLE_EQ(spread.p10, 2);
  EXPECT_DOUBLE_EQ(spread.p90, 10);
  EXPECT_DOUBLE_EQ(spread.relative(), 8.0 / 6.0);
}

TEST(Spread, LiesBetweenTwoSamplesWhereNoneIsThere) {
  const Spread spread = spread_of({4, 1, 2, 3});
  EXPECT_DOUBLE_EQ(spread.median, 2.5);
  EXPECT_DOUBLE_EQ(spread.p10, 1.3);
  EXPECT_DOUBLE_EQ(spread.p90, 3.7);
}

TEST(Spread, OfOneSampleAndOfNothing) {
  EXPECT_DOUBLE_EQ(spread_of({5}).p10, 5);
  EXPECT_DOUBLE_EQ(spread_of({5}).relative(), 0);
  EXPECT_DOUBLE_EQ(spread_of({}).median, 0);
  EXPECT_DOUBLE_EQ(spread_of({}).relative(), 0);
}

}  // namespace
}  // namespace distmoe::tools
