// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a call is one of few rows where the kernel takes it and for no other reason, and its
// tiles are the cheapest of those that the kernel has.
#include "backend/cuda/select/few_rows_choice.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "backend/choice_inputs.hpp"
#include "core/checked_math.hpp"

namespace distmoe::cuda {
namespace {

TEST(FewRowsChoice, WhatMakesACallNoneOfFewRowsIsNamed) {
  ChoiceInputs inputs = qwen();
  EXPECT_EQ(why_not_few(inputs, 0), NotFew::kNoTokens);
  EXPECT_EQ(why_not_few(inputs, 1), NotFew::kNo);
  EXPECT_EQ(why_not_few(inputs, 128), NotFew::kNo);
  EXPECT_EQ(why_not_few(inputs, 129), NotFew::kRoutes);
  inputs.num_experts = kFewExperts + 1;
  EXPECT_EQ(why_not_few(inputs, 1), NotFew::kExperts);
  inputs.num_experts = 8;
  EXPECT_EQ(why_not_few(inputs, kFewRowsPerExpert), NotFew::kNo);
  EXPECT_EQ(why_not_few(inputs, kFewRowsPerExpert + 1), NotFew::kRowsPerExpert);
  // Two ranks have as many rows of half as many experts.
  inputs.num_ranks = 2;
  EXPECT_EQ(why_not_few(inputs, kFewRowsPerExpert / 2), NotFew::kNo);
  EXPECT_EQ(why_not_few(inputs, kFewRowsPerExpert / 2 + 1), NotFew::kRowsPerExpert);
  inputs.num_experts = 2 * kFewExperts;
  EXPECT_EQ(why_not_few(inputs, 1), NotFew::kNo);
  inputs.combine = Combine::kPerRank;
  EXPECT_EQ(why_not_few(inputs, 1), NotFew::kSums);
  inputs.num_ranks = 1;
  inputs.num_experts = 8;
  EXPECT_EQ(why_not_few(inputs, 1), NotFew::kNo);
}

// What peers send is known on the device alone, except where no call can exceed it.
TEST(FewRowsChoice, WithPeersOneKernelIsEnoughWhereMaxTokensBoundTheRows) {
  ChoiceInputs inputs = qwen();
  EXPECT_TRUE(bounds_few_rows(inputs, 1 << 30));  // own tokens are all there are
  inputs.num_ranks = 2;
  EXPECT_EQ(max_few_rows(inputs), kFewRowsPerExpert * 64);
  EXPECT_TRUE(bounds_few_rows(inputs, 128));
  EXPECT_FALSE(bounds_few_rows(inputs, 129));
  // 2 * 33,600,000 rows of 8 made more tiles than count in 22 bits.
  EXPECT_FALSE(bounds_few_rows(inputs, 33'600'000));
  EXPECT_FALSE(bounds_few_rows(inputs, INT64_MAX));
}

TEST(FewRowsChoice, NoCallOfTheKernelHasMoreTilesThanItCounts) {
  ChoiceInputs inputs = qwen();
  inputs.num_ranks = 2;
  inputs.num_experts = 2 * kFewExperts;
  ASSERT_EQ(why_not_few(inputs, 1), NotFew::kNo);
  // One expert may have all rows but those of the others' tiles.
  const std::int64_t tiles = ceil_div(max_few_rows(inputs), kFewTileTokensMin) + kFewExperts;
  EXPECT_LT(tiles, std::int64_t{1} << 22);
}

TEST(FewRowsChoice, EveryReasonHasANameOfItsOwn) {
  std::vector<std::string> names;
  for (const NotFew reason : {NotFew::kNo, NotFew::kNoTokens, NotFew::kRoutes, NotFew::kExperts,
                              NotFew::kRowsPerExpert, NotFew::kSums}) {
    names.emplace_back(reason_name(reason));
  }
  std::ranges::sort(names);
  EXPECT_EQ(std::ranges::adjacent_find(names), names.end());
}

TEST(FewRowsChoice, ExpectedActiveExpertsAreThoseOfRandomRouting) {
  ChoiceInputs inputs = qwen();
  EXPECT_EQ(expected_active_experts(inputs, 1), 8);
  EXPECT_EQ(expected_active_experts(inputs, 16), 82);
  EXPECT_EQ(expected_active_experts(inputs, 4096), 128);
  inputs.num_ranks = 2;
  EXPECT_EQ(expected_active_experts(inputs, 8), 41);
  inputs.top_k = inputs.num_experts;
  EXPECT_EQ(expected_active_experts(inputs, 1), 64);
}

/// When the last block ends, by letting the blocks draw.
double simulated_end(std::int64_t w13_tiles, double w13_cost, std::int64_t w2_tiles, double w2_cost,
                     std::int32_t blocks) {
  std::vector<double> ends(static_cast<std::size_t>(blocks), 0.0);
  const auto draw = [&](std::int64_t tiles, double cost) {
    for (std::int64_t tile = 0; tile < tiles; ++tile) *std::ranges::min_element(ends) += cost;
  };
  draw(w13_tiles, w13_cost);
  draw(w2_tiles, w2_cost);
  return *std::ranges::max_element(ends);
}

TEST(FewRowsChoice, TheCostIsWhenTheLastBlockEnds) {
  std::mt19937 random(3);
  const auto any = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  for (int round = 0; round < 50; ++round) {
    ChoiceInputs inputs = qwen();
    inputs.hidden_dim = 8 * any(1, 500);
    inputs.intermediate_dim = 8 * any(1, 500);
    inputs.num_experts = any(8, 300);
    inputs.device_sms = any(2, 150);
    const ContextChoice choice = choose_kernels(inputs);
    const std::int64_t tokens = any(2, 128);
    const std::int64_t active = expected_active_experts(inputs, tokens);
    const auto candidates = rank_few_rows_tiles(inputs, choice, tokens);
    ASSERT_EQ(candidates.size(), 25u);
    EXPECT_TRUE(std::ranges::is_sorted(candidates, {}, &FewRowsCandidate::cost));
    // The cost of a tile follows from those of one block that draws all.
    ContextChoice one_block = choice;
    one_block.persistent_blocks = 1;
    for (const FewRowsCandidate& candidate : rank_few_rows_tiles(inputs, one_block, tokens)) {
      const FewRowsTiles& tiles = candidate.tiles;
      const auto same = [&](const FewRowsCandidate& other) {
        return other.tiles.w13_rows == tiles.w13_rows && other.tiles.w2_rows == tiles.w2_rows;
      };
      const double cost = std::ranges::find_if(candidates, same)->cost;
      const std::int64_t token_rows = ceil_div(tokens * inputs.top_k, active);
      const auto tile_cost = [&](std::int64_t m, std::int64_t rows, std::int64_t k) {
        return static_cast<double>((std::min(rows, m) + token_rows + 4) * k);
      };
      const std::int64_t m13 = 2 * inputs.intermediate_dim;
      const double simulated = simulated_end(
          active * ceil_div(m13, tiles.w13_rows), tile_cost(m13, tiles.w13_rows, inputs.hidden_dim),
          active * ceil_div(inputs.hidden_dim, tiles.w2_rows),
          tile_cost(inputs.hidden_dim, tiles.w2_rows, inputs.intermediate_dim),
          choice.persistent_blocks);
      EXPECT_NEAR(cost, simulated, 1e-6 * simulated);
    }
  }
}

// One token of Qwen3-30B-A3B: 8 experts of 1536 weight rows, and 16 of the 2048 rows of W2 of all 8
// at a time: a tile of each for nearly every SM.
TEST(FewRowsChoice, OneTokenGetsATileForEverySm) {
  ChoiceInputs inputs = qwen();
  const auto tiles = choose_few_rows(inputs, choose_kernels(inputs), 1);
  ASSERT_TRUE(tiles);
  EXPECT_EQ(tiles->w13_rows, 96);
  EXPECT_EQ(tiles->w2_rows, 16);
  EXPECT_EQ(tiles->tokens, 8);
  EXPECT_EQ(tiles->is_one_token, 1);
  // Not where its results go to peers, nor where W2 has many stages.
  inputs.num_ranks = 2;
  EXPECT_EQ(choose_few_rows(inputs, choose_kernels(inputs), 1)->is_one_token, 0);
  inputs.num_ranks = 1;
  inputs.intermediate_dim = 1536;
  EXPECT_EQ(choose_few_rows(inputs, choose_kernels(inputs), 1)->is_one_token, 0);
}

TEST(FewRowsChoice, ATileOfOneTokenFitsWhateverTheRoutes) {
  for (std::int64_t top_k = 1; top_k <= kOneTokenRoutes; ++top_k) {
    ChoiceInputs inputs = qwen();
    inputs.top_k = top_k;
    for (const FewRowsCandidate& candidate :
         rank_few_rows_tiles(inputs, choose_kernels(inputs), 1)) {
      EXPECT_EQ(candidate.tiles.is_one_token, 1);
      EXPECT_EQ(candidate.tiles.w2_rows % 8, 0);
      EXPECT_LE(candidate.tiles.w2_rows * top_k, kFewTileWeights);
    }
  }
}

TEST(FewRowsRing, HasAsManyStagesAsFit) {
  for (std::int32_t rows = kFewTileWeightsMin; rows <= kFewTileWeights; rows += 16) {
    for (std::int32_t tokens = kFewTileTokensMin; tokens <= kFewTileTokens; tokens *= 2) {
      const FewRowsRing ring =
          few_rows_ring({.w13_rows = rows, .w2_rows = 64, .tokens = tokens}, 8);
      EXPECT_GE(ring.num_stages, 8);
      EXPECT_LE(ring.num_stages, kFewStagesMax);
      EXPECT_LE(ring.num_stages * ring.stage_bytes, kFewRingBytes);
      EXPECT_EQ(ring.stage_bytes % 1024, 0);
      EXPECT_EQ(ring.token_offset % 1024, 0);
      EXPECT_EQ(ring.stage_bytes - ring.token_offset, tokens * kRowBytes);
    }
  }
}

}  // namespace
}  // namespace distmoe::cuda
