// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a message names the ranks that it is about, and stays readable however many they are;
// a timeout without end is a long one, not one of the past.
#include "comm/exchange.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace distmoe {
namespace {

std::string name_first(int count) {
  std::vector<int> ranks(static_cast<std::size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 1);
  return name_ranks(ranks);
}

TEST(NameRanks, NamesAllOfAFew) {
  EXPECT_EQ(name_first(1), "rank 1");
  EXPECT_EQ(name_first(2), "ranks 1 and 2");
  EXPECT_EQ(name_first(3), "ranks 1, 2 and 3");
  EXPECT_EQ(name_first(8), "ranks 1, 2, 3, 4, 5, 6, 7 and 8");
}

TEST(NameRanks, NamesTheFirstOfManyAndCountsTheOthers) {
  EXPECT_EQ(name_first(9), "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1 more");
  EXPECT_EQ(name_first((1 << 20) - 1), "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1048567 more");
}

TEST(Timeouts, AreWithinWhatAClockOfNanosecondsHolds) {
  using std::chrono::milliseconds;
  using std::chrono::nanoseconds;
  EXPECT_EQ(bounded(milliseconds(600'000)), milliseconds(600'000));
  EXPECT_EQ(bounded(milliseconds(-1)), milliseconds(0));
  EXPECT_EQ(bounded(milliseconds::min()), milliseconds(0));
  EXPECT_EQ(bounded(milliseconds::max()), std::chrono::hours(24 * 3650));
  EXPECT_GT(nanoseconds(bounded(milliseconds::max())).count(), 0);
  EXPECT_GT(deadline_after(milliseconds::max()),
            std::chrono::steady_clock::now() + std::chrono::hours(24));
}

}  // namespace
}  // namespace distmoe
