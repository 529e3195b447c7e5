// SPDX-License-Identifier: Apache-2.0
// Invariant: the bar fills with what is done, and an estimate of the rest comes once there is one.
#include "progress.hpp"

#include <gtest/gtest.h>

namespace distmoe::tools {
namespace {

TEST(ProgressLine, FillsItsBar) {
  EXPECT_EQ(progress_line("measuring", 0, 8, 0.1), "measuring [........................] 0/8");
  EXPECT_EQ(progress_line("measuring", 2, 8, 0.1), "measuring [######..................] 2/8");
  EXPECT_EQ(progress_line("measuring", 8, 8, 1.0), "measuring [########################] 8/8");
  EXPECT_EQ(progress_line("planning", 3, 0, 9.0), "planning");
}

TEST(ProgressLine, EstimatesWhatIsLeft) {
  EXPECT_EQ(progress_line("a", 1, 4, 5.0), "a [######..................] 1/4, about 15 s left");
  EXPECT_EQ(progress_line("a", 0, 4, 5.0), "a [........................] 0/4");
  EXPECT_EQ(progress_line("a", 4, 4, 5.0), "a [########################] 4/4, about 0 s left");
}

}  // namespace
}  // namespace distmoe::tools
