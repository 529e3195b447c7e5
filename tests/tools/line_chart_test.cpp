// SPDX-License-Identifier: Apache-2.0
// Invariant: an axis has a few round ticks within its range, and a chart keeps all it draws inside.
#include "results/line_chart.hpp"

#include <gtest/gtest.h>

#include <regex>

namespace distmoe::tools {
namespace {

TEST(LogTicks, AreRoundAndWithinTheRange) {
  EXPECT_EQ(log_ticks(0.9, 1500), (std::vector<double>{1, 10, 100, 1000}));
  EXPECT_EQ(log_ticks(0.15, 0.6), (std::vector<double>{0.2, 0.5}));
  EXPECT_EQ(log_ticks(40, 3000), (std::vector<double>{50, 100, 200, 500, 1000, 2000}));
  EXPECT_TRUE(log_ticks(1.1, 1.9).empty());
}

TEST(TickText, IsShort) {
  EXPECT_EQ(tick_text(0.05), "0.05");
  EXPECT_EQ(tick_text(2), "2");
  EXPECT_EQ(tick_text(2000), "2000");
  EXPECT_EQ(tick_text(20000), "20k");
  EXPECT_EQ(tick_text(5e6), "5M");
}

TEST(SvgOfAChart, HasItsPointsInsideAndItsWordsEscaped) {
  const std::string svg =
      svg_of({.description = "a < b",
              .x_title = "tokens",
              .y_title = "rate",
              .series = {{.points = {{1, 0.01, "T=1", "first"}, {4096, 300, "", "second & last"}}},
                         {.points = {{2, 5}}, .is_joined = false}}});
  EXPECT_NE(svg.find("<title>a &lt; b</title>"), std::string::npos);
  EXPECT_NE(svg.find("second &amp; last"), std::string::npos);
  EXPECT_NE(svg.find("T=1"), std::string::npos);
  const std::regex circle("<circle cx=\"([0-9.]+)\" cy=\"([0-9.]+)\"");
  int num_circles = 0;
  for (auto match = std::sregex_iterator(svg.begin(), svg.end(), circle);
       match != std::sregex_iterator(); ++match) {
    ++num_circles;
    EXPECT_GT(std::stod((*match)[1]), 52.0);
    EXPECT_LT(std::stod((*match)[1]), 346.0);
    EXPECT_GT(std::stod((*match)[2]), 26.0);
    EXPECT_LT(std::stod((*match)[2]), 226.0);
  }
  EXPECT_EQ(num_circles, 3);
}

}  // namespace
}  // namespace distmoe::tools
