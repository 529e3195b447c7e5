// SPDX-License-Identifier: Apache-2.0
// Invariant: a floor is what one rank must compute, read or send at least, by hand-counted
// examples.
#include "bench/traffic.hpp"

#include <gtest/gtest.h>

namespace distmoe::tools {
namespace {

constexpr double kD = 10.0;
constexpr double kExpertBytes = 3 * 10 * 7 * 2.0;

/// D = 10, F = 7, E = 4, K = 3: ranks 0 and 1 own experts 0, 1 and 2, 3.
const BenchShape kShape{"", 10, 7, 3, 4, false};

TEST(Traffic, OfOneRankCrossesNoLink) {
  const std::vector<RoutedTokens> ranks = {{{0, 1, 2, 0, 1, -1}, {}}};
  const CallTraffic traffic = count_traffic(kShape, ranks, Combine::kPerRoute);
  EXPECT_EQ(traffic.flops, 6.0 * 5 * 10 * 7);
  EXPECT_EQ(traffic.weight_bytes, 3 * kExpertBytes);
  EXPECT_EQ(traffic.link_bytes, 0.0);
  EXPECT_EQ(traffic.combine_bytes, (5 + 2) * kD * 2);
  EXPECT_EQ(traffic.output_bytes, 2 * kD * 2);
  EXPECT_EQ(traffic.gradient_bytes, 0.0);
  EXPECT_EQ(traffic.rows, 5);
}

/// Rank 0 has more tokens' routes disabled than rank 1: what counts is the rank that brings more.
TEST(Traffic, DisabledRoutesAreNoWork) {
  const std::vector<RoutedTokens> ranks = {{{-1, -1, -1, 0, -1, -1}, {}},
                                           {{2, -1, 3, 1, 0, -1}, {}}};
  const CallTraffic traffic = count_traffic(kShape, ranks, Combine::kPerRoute);
  EXPECT_EQ(traffic.flops, 6.0 * 4 * 10 * 7);
  EXPECT_EQ(traffic.combine_bytes, (4 + 2) * kD * 2);
  const std::vector<RoutedTokens> idle = {{{-1, -1, -1}, {}}};
  const CallTraffic none = count_traffic(kShape, idle, Combine::kPerRoute);
  EXPECT_EQ(none.flops, 0.0);
  EXPECT_EQ(none.weight_bytes, 0.0);
  EXPECT_EQ(none.combine_bytes, kD * 2);  // y is written
}

TEST(Traffic, ATokenCrossesToARankOnceAndItsRoutesReturn) {
  // Rank 0's tokens name two, and then no, experts of rank 1; rank 1's token one of rank 0.
  const std::vector<RoutedTokens> ranks = {{{0, 2, 3, 0, 1, -1}, {}}, {{1, 2, 3, -1, -1, -1}, {}}};
  const CallTraffic traffic = count_traffic(kShape, ranks, Combine::kPerRoute);
  // Out of rank 0: a token and one result. Into rank 0: a token and two results.
  EXPECT_EQ(traffic.link_bytes, 3 * kD * 2);
  EXPECT_EQ(traffic.dispatch_bytes, kD * 2);
  EXPECT_EQ(traffic.return_bytes, 2 * kD * 2);
  EXPECT_EQ(traffic.rows, 4);
  EXPECT_EQ(traffic.weight_bytes, 2 * kExpertBytes);
  // Summed by rank, one FP32 row returns whatever the routes: a token and a sum each way.
  const CallTraffic summed = count_traffic(kShape, ranks, Combine::kPerRank);
  EXPECT_EQ(summed.link_bytes, kD * 2 + kD * 4);
  EXPECT_EQ(summed.dispatch_bytes, kD * 2);
  EXPECT_EQ(summed.return_bytes, kD * 4);
}

TEST(Traffic, ExpertsPerRankBelongToTheirRank) {
  const BenchShape shape{"", 10, 7, 1, 2, true};
  const std::vector<RoutedTokens> ranks = {{{0}, {}}, {{3}, {}}};
  EXPECT_EQ(count_traffic(shape, ranks, Combine::kPerRoute).link_bytes, 0.0);
}

TEST(Traffic, OfATrainingStepIsThatOfForwardAndBackward) {
  const std::vector<RoutedTokens> ranks = {{{0, 2, 3, 0, 1, -1}, {}}, {{1, 2, 3, -1, -1, -1}, {}}};
  const CallTraffic forward = count_traffic(kShape, ranks, Combine::kPerRoute);
  const CallTraffic step = count_training_traffic(kShape, ranks, Combine::kPerRoute);
  EXPECT_EQ(step.flops, 3 * forward.flops);
  EXPECT_EQ(step.weight_bytes, 3 * 2 * kExpertBytes);
  EXPECT_EQ(step.gradient_bytes, 2 * kExpertBytes);
  EXPECT_EQ(step.link_bytes, 2 * 3 * kD * 2);
  EXPECT_EQ(step.rows, forward.rows);
  // A backward returns a row for every route, whatever the combine.
  EXPECT_EQ(count_training_traffic(kShape, ranks, Combine::kPerRank).link_bytes,
            kD * 2 + kD * 4 + 3 * kD * 2);
}

/// D = F = 64, so that a row has whole blocks.
TEST(Traffic, LowPrecisionsReadAndSendTheirCodes) {
  const BenchShape shape{"", 64, 64, 1, 2, false};
  const std::vector<RoutedTokens> ranks = {{{1}, {}}, {{1}, {}}};
  const auto weights = [&](Precision precision) {
    return count_traffic(shape, ranks, Combine::kPerRoute, precision).weight_bytes;
  };
  constexpr double kElements = 3 * 64 * 64;
  EXPECT_EQ(weights(Precision::kBF16), kElements * 2);
  EXPECT_EQ(weights(Precision::kMXFP8), kElements + kElements / 32);
  EXPECT_EQ(weights(Precision::kNVFP4), kElements / 2 + kElements / 16);
  EXPECT_EQ(weights(Precision::kMXFP4), kElements / 2 + kElements / 32);
  const auto sent = [&](Precision precision) {
    return count_traffic(shape, ranks, Combine::kPerRoute, precision).dispatch_bytes;
  };
  EXPECT_EQ(sent(Precision::kMXFP8), 64 + 16);  // two scales, in a line of 16 bytes
  EXPECT_EQ(sent(Precision::kNVFP4), 32 + 16);  // four scales and a factor
  EXPECT_EQ(sent(Precision::kMXFP4), 64 * 2);
  // Codes and their tiles' scales twice, and a BF16 gradient; rows as BF16.
  const CallTraffic step =
      count_training_traffic(shape, ranks, Combine::kPerRoute, Precision::kMXFP8);
  EXPECT_EQ(step.weight_bytes, 2 * (kElements + kElements / 1024) + kElements * 2);
  EXPECT_EQ(step.gradient_bytes, kElements * 2);
  EXPECT_EQ(step.dispatch_bytes, 64 * 2);
}

TEST(Floor, IsTheLargestOfComputeWeightsAndLink) {
  CallTraffic traffic{
      .flops = 100, .weight_bytes = 200, .link_bytes = 300, .combine_bytes = 50, .rows = 1};
  MachineRates rates{.flops = 100, .copied_bytes = 50, .read_bytes = 100, .link_bytes = 100};
  EXPECT_DOUBLE_EQ(products_floor_us(traffic, rates).value(), 3e6);
  rates.link_bytes = 1000;
  EXPECT_DOUBLE_EQ(products_floor_us(traffic, rates).value(), 2e6);
  rates.read_bytes = 1000;
  EXPECT_DOUBLE_EQ(products_floor_us(traffic, rates).value(), 1e6);
}

TEST(Floor, OfMemoryIsAtTheRateOfWhatIsDoneToIt) {
  const MachineRates rates{.copied_bytes = 100, .read_bytes = 200, .written_bytes = 50};
  EXPECT_DOUBLE_EQ(memory_floor_us(400, 0, rates).value(), 2e6);  // not 4: a copy also writes
  EXPECT_DOUBLE_EQ(memory_floor_us(0, 400, rates).value(), 8e6);
  EXPECT_DOUBLE_EQ(memory_floor_us(400, 200, rates).value(), 4e6);
  // At once or one after the other: all bytes at the fastest rate is what no mix can beat.
  EXPECT_DOUBLE_EQ(
      memory_floor_us(400, 200, {.copied_bytes = 300, .read_bytes = 250, .written_bytes = 250})
          .value(),
      2e6);
  EXPECT_DOUBLE_EQ(memory_floor_us(400, 0, {.read_bytes = 200}).value(), 2e6);
  EXPECT_FALSE(memory_floor_us(400, 1, {.read_bytes = 200}));
  EXPECT_FALSE(memory_floor_us(1, 400, {.copied_bytes = 100, .written_bytes = 50}));
}

TEST(Floor, GradientsAndOutputsAreWritten) {
  const MachineRates rates{
      .flops = 1e9, .copied_bytes = 100, .read_bytes = 100, .written_bytes = 10};
  EXPECT_DOUBLE_EQ(
      products_floor_us({.flops = 1, .weight_bytes = 300, .gradient_bytes = 100}, rates).value(),
      10e6);
  EXPECT_DOUBLE_EQ(combine_floor_us({.combine_bytes = 50, .output_bytes = 10}, rates).value(), 1e6);
}

TEST(Floor, OfAnExchangeIsTheLinkAndThenTheSum) {
  const CallTraffic traffic{.dispatch_bytes = 20, .return_bytes = 60, .combine_bytes = 50};
  const MachineRates rates{.read_bytes = 100, .link_bytes = 10};
  EXPECT_DOUBLE_EQ(exchange_dispatch_floor_us(traffic, rates).value(), 2e6);
  EXPECT_DOUBLE_EQ(exchange_combine_floor_us(traffic, rates).value(), 6.5e6);
  EXPECT_FALSE(exchange_dispatch_floor_us({}, rates));
  EXPECT_FALSE(exchange_dispatch_floor_us(traffic, {}));
  EXPECT_DOUBLE_EQ(exchange_combine_floor_us({.combine_bytes = 50}, rates).value(), 0.5e6);
}

TEST(Floor, NeedsComputeAndMemoryRatesButNoLink) {
  const CallTraffic traffic{
      .flops = 100, .weight_bytes = 200, .link_bytes = 300, .combine_bytes = 50, .rows = 1};
  EXPECT_DOUBLE_EQ(products_floor_us(traffic, {.flops = 100, .read_bytes = 100}).value(), 2e6);
  EXPECT_FALSE(products_floor_us(traffic, {.read_bytes = 100}));
  EXPECT_FALSE(products_floor_us(traffic, {.flops = 100, .copied_bytes = 100}));
  EXPECT_FALSE(combine_floor_us(traffic, {}));
}

}  // namespace
}  // namespace distmoe::tools
