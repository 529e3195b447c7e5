// SPDX-License-Identifier: Apache-2.0
// Invariant: only what one GPU and two with a link measured alike is projected, by the formula that
// docs/performance.md states.
#include "results/projection.hpp"

#include <gtest/gtest.h>

namespace distmoe::tools {
namespace {

/// Mixtral-8x7B with 8192 tokens, as measured on one of two H200.
ResultRow mixtral() {
  ResultRow row;
  row.shape = "Mixtral-8x7B";
  row.hidden_dim = 4096;
  row.top_k = 2;
  row.experts = 8;
  row.mode = "forward";
  row.backend = "cuda";
  row.routing = "uniform";
  row.precision = "bf16";
  row.combine = "per_route";
  row.tokens = 8192;
  row.median_us = 8623;
  row.bound_us = 8373;
  row.flops = 5.77e12;
  row.weight_bytes = 2.82e9;
  row.dense_tflops = 657;
  row.read_tb_s = 4.45;
  return row;
}

ResultRow on_two(ResultRow row, double us) {
  row.ranks = 2;
  row.median_us = us;
  row.link_gb_s = 337;
  return row;
}

TEST(Projection, LinkCarriesATokenOnceAndARowOfEveryRouteBack) {
  // Two of eight experts: none of the four of the other rank with chance 6 / 28.
  const double rows = 8192 * (22.0 / 28.0) + 8192 * 2 * 0.5;
  EXPECT_NEAR(link_us_of(mixtral(), 2, 8, 337), rows * 4096 * 2 / 337e3, 1e-6);
  // Of eight ranks each owns one expert; a token needs one of the seven others with chance 1 / 4.
  const double more = 8192 * 7 * 0.25 + 8192 * 2 * 7.0 / 8.0;
  EXPECT_NEAR(link_us_of(mixtral(), 8, 8, 337), more * 4096 * 2 / 337e3, 1e-6);
  EXPECT_EQ(link_us_of(mixtral(), 1, 8, 337), 0.0);
}

TEST(Projection, GrowsWithTheTrafficThatTwoDidNotHide) {
  const ResultRow one = mixtral();
  const ResultRow two = on_two(one, 8996);
  const auto projections = projections_of({&one, &two});
  ASSERT_EQ(projections.size(), 1U);
  EXPECT_NEAR(projections[0].link_of_two_us, 356, 0.5);
  EXPECT_NEAR(projections[0].seen, 1.05, 0.005);
  EXPECT_NEAR(projections[0].link_us, 697, 0.5);
  EXPECT_NEAR(projections[0].us, 9354, 1);
}

TEST(Projection, IsNeverLessThanTheLinkTakesBesideTheProducts) {
  ResultRow one = mixtral();
  one.bound_us = 1.0;
  const ResultRow two = on_two(one, one.median_us);
  const auto projections = projections_of({&one, &two});
  ASSERT_EQ(projections.size(), 1U);
  EXPECT_EQ(projections[0].seen, 0.0);
  EXPECT_NEAR(projections[0].us, one.median_us - 1.0 + projections[0].link_us, 1e-9);
}

TEST(Projection, OfUnstableTimesIsUnstable) {
  const ResultRow one = mixtral();
  ResultRow two = on_two(one, 8996);
  EXPECT_FALSE(projections_of({&one, &two}).at(0).is_unstable());
  two.is_unstable = true;
  EXPECT_TRUE(projections_of({&one, &two}).at(0).is_unstable());
}

TEST(Projection, AShapeWithExpertsForEachRankHasMoreOfThem) {
  const ResultRow one = mixtral();
  ResultRow two = on_two(one, 8996);
  two.experts = 16;
  const auto projections = projections_of({&one, &two});
  ASSERT_EQ(projections.size(), 1U);
  EXPECT_EQ(projections[0].link_us, link_us_of(one, 8, 64, 337));
}

TEST(Projection, NothingElseIsProjected) {
  const ResultRow one = mixtral();
  const ResultRow two = on_two(one, 8996);
  using Change = void (*)(ResultRow * a, ResultRow * b);
  constexpr Change kChanges[] = {
      [](ResultRow* a, ResultRow*) { a->bound_us.reset(); },
      [](ResultRow*, ResultRow* b) { b->link_gb_s.reset(); },
      [](ResultRow*, ResultRow* b) { b->tokens = 4096; },
      [](ResultRow*, ResultRow* b) { b->backend = "cpu"; },
      [](ResultRow*, ResultRow* b) { b->machine = "another"; },
      [](ResultRow* a, ResultRow* b) { a->routing = b->routing = "zipf"; },
      [](ResultRow* a, ResultRow* b) { a->combine = b->combine = "per_rank"; },
      [](ResultRow* a, ResultRow* b) { a->mode = b->mode = "train"; },
      [](ResultRow* a, ResultRow* b) { a->precision = b->precision = "mxfp8"; },
      [](ResultRow* a, ResultRow* b) { a->flops = b->flops = 1e10; }};
  for (const Change change : kChanges) {
    ResultRow a = one;
    ResultRow b = two;
    change(&a, &b);
    EXPECT_TRUE(projections_of({&a, &b}).empty());
  }
}

}  // namespace
}  // namespace distmoe::tools
