// SPDX-License-Identifier: Apache-2.0
// Invariant: all ranks plan a row alike, its context holds every set's routing, and the sets are
// more than a cache holds.
#include "bench/bench_case.hpp"

#include <gtest/gtest.h>

#include "distmoe/error.hpp"
#include "distmoe/memory_plan.hpp"
#include "plan/capacity_rows.hpp"

namespace distmoe::tools {
namespace {

/// D = 64, F = 32, E = 8, K = 2.
const BenchShape kShape{"", 64, 32, 2, 8, false};

BenchCase case_of_rank(const BenchOptions& options, int rank, std::int64_t cache_bytes = 1000,
                       int num_laps = 10) {
  return make_bench_case(kShape, 50,
                         {.options = options,
                          .rank = rank,
                          .num_ranks = 3,
                          .cache_bytes = cache_bytes,
                          .num_laps = num_laps});
}

TEST(BenchCase, IsTheSamePlanOnEveryRankWithTokensOfItsOwn) {
  for (const RoutingKind kind : {RoutingKind::kUniform, RoutingKind::kZipf}) {
    BenchOptions options;
    options.routing = kind;
    const BenchCase one = case_of_rank(options, 0);
    const BenchCase two = case_of_rank(options, 1);
    EXPECT_EQ(one.config, two.config);
    EXPECT_EQ(one.traffic.rows, two.traffic.rows);
    EXPECT_EQ(one.traffic.link_bytes, two.traffic.link_bytes);
    EXPECT_EQ(one.sets.size(), two.sets.size());
    EXPECT_NE(one.sets[0].ids, two.sets[0].ids);
    EXPECT_NE(one.sets[0].ids, one.sets[1].ids);
    EXPECT_TRUE(one.config.distinct_experts);
  }
}

TEST(BenchCase, PlansExactlyTheRowsOfItsFullestRank) {
  BenchOptions options;
  options.routing = RoutingKind::kZipf;
  const BenchCase row = case_of_rank(options, 0);
  EXPECT_GT(row.traffic.rows, 50 * 2);
  EXPECT_EQ(capacity_rows(row.config, 3, row.config.device_scratch_capacity_factor),
            row.traffic.rows);
}

TEST(BenchCase, OfTrainingSavesEverythingOrInputsAlone) {
  BenchOptions options;
  options.routing = RoutingKind::kZipf;
  const BenchCase forward = case_of_rank(options, 0);
  EXPECT_TRUE(forward.config.inference);
  options.mode = BenchMode::kTrain;
  options.activation_policy = ActivationPolicy::kLean;
  const BenchCase row = case_of_rank(options, 0);
  EXPECT_FALSE(row.config.inference);
  EXPECT_EQ(row.config.activation_policy, ActivationPolicy::kLean);
  const MemoryPlan plan = plan_memory(row.config, 3);
  EXPECT_EQ(plan.slot_bytes, plan.max_useful_slot_bytes);
  EXPECT_EQ(row.traffic.flops, 3 * forward.traffic.flops);
  EXPECT_EQ(row.traffic.rows, forward.traffic.rows);
  options.recompute = true;
  const MemoryPlan least = plan_memory(case_of_rank(options, 0).config, 3);
  EXPECT_EQ(least.slot_bytes, least.minimum_slot_bytes);
  EXPECT_LT(least.slot_bytes, plan.slot_bytes);
}

TEST(BenchCase, HasSetsOfTwiceTheCacheButNoMoreThanLaps) {
  const BenchOptions options;
  // A call touches 8 experts of 12288 bytes on 3 ranks and 12800 bytes of tokens.
  EXPECT_EQ(case_of_rank(options, 0, 1000).sets.size(), 2u);
  EXPECT_EQ(case_of_rank(options, 0, 1000).num_weight_copies, 1);
  const BenchCase cached = case_of_rank(options, 0, 200000, 100);
  EXPECT_EQ(cached.sets.size(), 9u);  // 400000 / (3 * 12288 + 12800), rounded up
  EXPECT_EQ(cached.num_weight_copies, 9);
  EXPECT_EQ(case_of_rank(options, 0, 1 << 30, 7).sets.size(), 7u);
}

TEST(BenchCase, NumbersTokensAcrossSetsAndRanks) {
  const BenchOptions options;
  const BenchCase row = case_of_rank(options, 0);
  EXPECT_EQ(row.first_token(0, 0, 3), 0);
  EXPECT_EQ(row.first_token(0, 2, 3), 100);
  EXPECT_EQ(row.first_token(2, 1, 3), 350);
}

TEST(BenchCase, SizesThatNoConfigHasAreRefused) {
  BenchShape shape = kShape;
  shape.top_k = 9;
  const BenchOptions options;
  EXPECT_THROW(
      make_bench_case(
          shape, 5,
          {.options = options, .rank = 0, .num_ranks = 1, .cache_bytes = 1, .num_laps = 1}),
      Error);
}

TEST(CopiesBeyondCache, StayBetweenTheirBounds) {
  EXPECT_EQ(copies_beyond_cache(100, 200, 1, 50), 4);
  EXPECT_EQ(copies_beyond_cache(1000, 200, 1, 50), 1);
  EXPECT_EQ(copies_beyond_cache(1000, 200, 2, 50), 2);
  EXPECT_EQ(copies_beyond_cache(1, 200, 1, 50), 50);
  EXPECT_EQ(copies_beyond_cache(0, 200, 1, 50), 50);
}

}  // namespace
}  // namespace distmoe::tools
