// SPDX-License-Identifier: Apache-2.0
// Invariant: 1 for equal rows, the number of experts where one has all, nothing without rows.
#include "runtime/imbalance.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace distmoe {
namespace {

using Rows = std::vector<std::int64_t>;

TEST(ImbalanceOf, IsTheBusiestOverTheMean) {
  EXPECT_EQ(imbalance_of(Rows{5, 5, 5}), 1.0);
  EXPECT_EQ(imbalance_of(Rows{0, 9, 0}), 3.0);
  EXPECT_DOUBLE_EQ(*imbalance_of(Rows{8, 2, 4}), 8.0 / (14.0 / 3.0));
}

TEST(ImbalanceOf, IsNothingWithoutRows) {
  EXPECT_FALSE(imbalance_of(Rows{0, 0}));
  EXPECT_FALSE(imbalance_of(Rows{}));
}

}  // namespace
}  // namespace distmoe
