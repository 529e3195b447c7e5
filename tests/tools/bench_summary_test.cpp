// SPDX-License-Identifier: Apache-2.0
// Invariant: figures follow from medians of samples and hand-counted work, and what was not
// measured stays empty.
#include "bench/bench_summary.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace distmoe::tools {
namespace {

BenchCase sample_case() {
  BenchCase plan;
  plan.shape.name = "A";
  plan.num_tokens = 7;
  plan.traffic = {
      .flops = 4e9, .weight_bytes = 1e6, .link_bytes = 2e6, .combine_bytes = 3e6, .rows = 9};
  return plan;
}

/// 1e14 FLOP/s, 1e12, 2e12, 4e12 and 1e11 bytes/s.
const CeilingSamples kSamples{{9e-8, 1e-8, 1e-8}, {1e-6}, {5e-7}, {2.5e-7}, {1e-5}};

TEST(BenchSummary, RatesAreWorkPerSecondOfTheFastestTenthOfTheRounds) {
  Samples dense(11, 3e-8);
  dense[4] = 1e-8;  // the fastest tenth ends here
  dense[7] = 1e-9;
  EXPECT_DOUBLE_EQ(rates_of({dense, {}, {}, {}, {}}).flops.value(), 1e14);
  const MachineRates rates = rates_of(kSamples);
  EXPECT_DOUBLE_EQ(rates.flops.value(), 1e14);
  const BenchCeilings ceilings = ceilings_of(rates);
  EXPECT_DOUBLE_EQ(ceilings.dense_tflops.value(), 100);
  EXPECT_DOUBLE_EQ(ceilings.copy_tb_s.value(), 1);
  EXPECT_DOUBLE_EQ(ceilings.read_tb_s.value(), 2);
  EXPECT_DOUBLE_EQ(ceilings.write_tb_s.value(), 4);
  EXPECT_DOUBLE_EQ(ceilings.link_gb_s.value(), 100);
  const MachineRates none = rates_of({{0, 0}, {}, {0}, {}, {0, 0, 0}});
  EXPECT_FALSE(none.flops || none.copied_bytes || none.read_bytes || none.written_bytes ||
               none.link_bytes);
}

TEST(BenchSummary, ARowHasTheRateFloorAndBoundOfItsRank) {
  const RowSamples samples{{70, 50, 40}, {2e-8}};
  const BenchRow row =
      summarize_row(sample_case(), BenchMode::kForward, samples, {}, rates_of(kSamples), 1);
  EXPECT_EQ(row.shape.name, "A");
  EXPECT_EQ(row.tokens, 7);
  EXPECT_DOUBLE_EQ(row.us.median, 50);
  EXPECT_DOUBLE_EQ(row.tflops.value(), 80);
  EXPECT_DOUBLE_EQ(row.floor_us.value(), 40);
  EXPECT_DOUBLE_EQ(row.efficiency().value(), 0.8);
  EXPECT_DOUBLE_EQ(row.bound_us.value(), 80);
  // Two ranks on the device: each has half of its rates, and its own work.
  const BenchRow shared =
      summarize_row(sample_case(), BenchMode::kGemm, samples, {}, rates_of(kSamples), 2);
  EXPECT_DOUBLE_EQ(shared.tflops.value(), 80);
  EXPECT_DOUBLE_EQ(shared.floor_us.value(), 80);
  EXPECT_DOUBLE_EQ(shared.bound_us.value(), 160);
}

/// Else a row whose own products run faster than the large one would beat its floor.
TEST(BenchSummary, ABoundThatIsFasterThanTheLargeProductIsTheCeilingOfItsRow) {
  const RowSamples samples{{36}, {8e-9}};
  const BenchRow row =
      summarize_row(sample_case(), BenchMode::kForward, samples, {}, rates_of(kSamples), 1);
  EXPECT_DOUBLE_EQ(row.floor_us.value(), 32);
  EXPECT_DOUBLE_EQ(row.ceilings.dense_tflops.value(), 100);
  const RowSamples alone{{36}, {0}};
  EXPECT_DOUBLE_EQ(
      summarize_row(sample_case(), BenchMode::kForward, alone, {}, rates_of(kSamples), 1)
          .floor_us.value(),
      40);
}

TEST(BenchSummary, RatiosAreOfSamplesOfOneRound) {
  EXPECT_DOUBLE_EQ(ratio_of({30, 10, 80}, {10, 10, 20}).value(), 3);
  EXPECT_FALSE(ratio_of({30, 10}, {10, 0}));
  // A clock that falls by half in the second round halves both: the ratio stays.
  RowSamples samples{.us = {50, 100}, .bound = {1e-8, 2e-8}};
  samples.peers = {{100, 300}};
  samples.steps = {{1, 2}, {5, 6}};
  const BenchRow row =
      summarize_row(sample_case(), BenchMode::kForward, samples, {}, rates_of(kSamples), 1);
  EXPECT_DOUBLE_EQ(row.bound_ratio.value(), 50 / 40.0);
  ASSERT_EQ(row.peers.size(), 1U);
  EXPECT_DOUBLE_EQ(row.peers[0].ratio, 2.5);
  EXPECT_DOUBLE_EQ(row.peers[0].us.median, 200);
  ASSERT_EQ(row.steps.size(), 2U);
  EXPECT_DOUBLE_EQ(row.steps[1].us, 5.5);
  // Two ranks on one machine take turns in the bound, whose rate they share.
  const BenchRow shared =
      summarize_row(sample_case(), BenchMode::kForward, samples, {}, rates_of(kSamples), 2);
  EXPECT_DOUBLE_EQ(shared.bound_ratio.value(), 50 / 80.0);
}

TEST(BenchSummary, StepsWithoutProductsHaveNoRate) {
  const RowSamples samples{{50}, {0}};
  const BenchRow combine =
      summarize_row(sample_case(), BenchMode::kCombine, samples, {}, rates_of(kSamples), 1);
  EXPECT_FALSE(combine.tflops);
  EXPECT_FALSE(combine.bound_us);
  EXPECT_DOUBLE_EQ(combine.floor_us.value(), 1.5);  // results are read
  const BenchRow dispatch =
      summarize_row(sample_case(), BenchMode::kDispatch, samples, {}, rates_of(kSamples), 1);
  EXPECT_FALSE(dispatch.tflops || dispatch.floor_us || dispatch.efficiency());
}

TEST(BenchSummary, ATrainingStepHasTheMediansOfItsParts) {
  const RowSamples samples{.us = {70, 50, 40},
                           .bound = {2e-8},
                           .forward = {20, 15, 10},
                           .backward = {50, 36, 30},
                           .restore = {9, 8, 4}};
  const BenchRow row =
      summarize_row(sample_case(), BenchMode::kTrain, samples, {}, rates_of(kSamples), 1);
  EXPECT_DOUBLE_EQ(row.forward_us.value(), 15);
  EXPECT_DOUBLE_EQ(row.backward_us.value(), 36);
  EXPECT_DOUBLE_EQ(row.restore_us.value(), 8);
  EXPECT_DOUBLE_EQ(row.tflops.value(), 80);
  EXPECT_DOUBLE_EQ(row.floor_us.value(), 40);
  const BenchRow forward =
      summarize_row(sample_case(), BenchMode::kForward, samples, {}, rates_of(kSamples), 1);
  EXPECT_FALSE(forward.forward_us || forward.backward_us || forward.restore_us);
}

TEST(BenchSummary, TheFarthestOfATrainingStepsResultsCounts) {
  const auto distance = [](float value, double reference) {
    ComparisonSums sums;
    sums.add({static_cast<const void*>(&value), DType::kF32, {1}},
             {static_cast<const void*>(&reference), DType::kF64, {1}});
    return sums;
  };
  CallCheck check{.y = distance(1, 1.25), .grad_x = distance(1, 2), .grad_scores = distance(1, 1)};
  EXPECT_DOUBLE_EQ(check.rel_l2(), 0.5);
  CallCheck other;
  other.grad_scores = distance(1, 4);
  other.is_equal = false;
  check.merge(other);
  EXPECT_DOUBLE_EQ(check.rel_l2(), 3 / std::sqrt(17.0));
  EXPECT_FALSE(check.is_equal);
}

TEST(BenchSummary, TheCheckOfTheTimedCallReachesTheRow) {
  CallCheck check;
  const std::vector<std::uint16_t> y = {0x3F80};  // 1
  const std::vector<double> reference = {2.0};
  check.y.add({static_cast<const void*>(y.data()), DType::kBF16, {1}},
              {static_cast<const void*>(reference.data()), DType::kF64, {1}});
  check.is_equal = false;
  const BenchRow row =
      summarize_row(sample_case(), BenchMode::kForward, {{50}, {}}, check, rates_of(kSamples), 1);
  EXPECT_DOUBLE_EQ(row.rel_l2, 0.5);
  EXPECT_FALSE(row.is_bitwise_repeatable);
}

}  // namespace
}  // namespace distmoe::tools
