// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the choice of kernels is a pure function that names what it drops and why, never
// chooses no blocks, takes no more than its share of a device, and ranks first what the device
// computes for itself.
#include "backend/cuda/select/kernel_choice.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "backend/choice_inputs.hpp"
#include "plan/plan_testing.hpp"

namespace distmoe::cuda {
namespace {

TEST(KernelChoice, AWholeDeviceIsUsedByItsOnlyRank) {
  const ContextChoice choice = choose_kernels(qwen());
  EXPECT_EQ(choice.persistent_blocks, 132);
  EXPECT_EQ(choice.clusters(), 66);
  EXPECT_EQ(choice.pulling_clusters, 0);
  EXPECT_EQ(choice.publish_blocks, 4 * 132);
}

TEST(KernelChoice, SumsAreSentPerRankToPeersAlone) {
  ChoiceInputs inputs = qwen();
  inputs.num_ranks = 2;
  EXPECT_EQ(choose_kernels(inputs).rank_sum_blocks, 0);
  inputs.combine = Combine::kPerRank;
  EXPECT_EQ(choose_kernels(inputs).rank_sum_blocks, 8 * 132);
  inputs.num_ranks = 1;
  EXPECT_EQ(choose_kernels(inputs).rank_sum_blocks, 0);
}

TEST(KernelChoice, MoreRoutesOfATokenThanRoutingCountsAreRefused) {
  ChoiceInputs inputs = qwen();
  inputs.num_experts = 300;
  inputs.top_k = 255;
  EXPECT_NO_THROW(choose_kernels(inputs));
  inputs.top_k = 256;
  expect_error(
      ErrorCode::kUnsupported, [&] { choose_kernels(inputs); }, "top_k is 256", "at most 255");
}

/// Rows are counted in 64 bits and numbered with 32: a plan that has room for more than that would
/// be addressed through wrapped numbers.
TEST(KernelChoice, PlansBeyond32BitNumbersAreRefusedWithBoth) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  EXPECT_NO_THROW(check_indices(kMost, 255, kMost));
  expect_error(
      ErrorCode::kUnsupported, [] { check_indices(kMost + 1, 2, 1 << 20); },
      "the plan has 2147483648 rows", "at most 2147483647");
  expect_error(
      ErrorCode::kUnsupported, [] { check_indices(1000, 257, kMost); }, "257 ranks",
      "max_tokens=2147483647", "2155872256 chunks");
}

TEST(KernelChoice, RanksShareADeviceWithoutOverlap) {
  ChoiceInputs inputs = qwen();
  inputs.num_ranks = 200;
  for (std::int64_t sms = 2; sms <= 160; ++sms) {
    inputs.device_sms = sms;
    std::int32_t previous = 1 << 20;
    for (std::int64_t ranks = 1; ranks <= sms / 2; ++ranks) {
      inputs.ranks_on_device = ranks;
      const ContextChoice choice = choose_kernels(inputs);
      ASSERT_GE(choice.persistent_blocks, kClusterBlocks);
      ASSERT_EQ(choice.persistent_blocks % kClusterBlocks, 0);
      ASSERT_LE(choice.persistent_blocks * ranks, sms);
      ASSERT_LE(choice.persistent_blocks, previous) << ranks << " ranks, " << sms << " SMs";
      ASSERT_GE(choice.pulling_clusters, 1);
      ASSERT_LE(choice.pulling_clusters, choice.clusters());
      ASSERT_GT(choice.publish_blocks, 0);
      previous = choice.persistent_blocks;
    }
  }
}

TEST(KernelChoice, MoreSmsNeverMakeFewerBlocks) {
  ChoiceInputs inputs = qwen();
  std::int32_t previous = 0;
  for (std::int64_t sms = 2; sms <= 300; ++sms) {
    inputs.device_sms = sms;
    const std::int32_t blocks = choose_kernels(inputs).persistent_blocks;
    ASSERT_GE(blocks, previous);
    previous = blocks;
  }
}

TEST(KernelChoice, ShareOfADeviceByHand) {
  ChoiceInputs inputs = qwen();
  inputs.num_ranks = 128;
  inputs.ranks_on_device = 4;
  EXPECT_EQ(choose_kernels(inputs).persistent_blocks, 32);
  EXPECT_EQ(choose_kernels(inputs).pulling_clusters, 8);
  inputs.ranks_on_device = 17;
  EXPECT_EQ(choose_kernels(inputs).persistent_blocks, 6);
  EXPECT_EQ(choose_kernels(inputs).pulling_clusters, 3);
  inputs.ranks_on_device = 67;
  expect_error(
      ErrorCode::kUnsupported, [&] { choose_kernels(inputs); }, "67 ranks share", "1 of 132 SMs");
}

TEST(KernelChoice, AllowedSmsBoundTheBlocks) {
  ChoiceInputs inputs = qwen();
  for (const auto& [allowed, blocks] : {std::pair{20, 20}, {500, 132}, {3, 2}, {131, 130}}) {
    inputs.allowed_sms = allowed;
    EXPECT_EQ(choose_kernels(inputs).persistent_blocks, blocks) << allowed << " SMs";
  }
  inputs.allowed_sms = 1;
  expect_error(
      ErrorCode::kUnsupported, [&] { choose_kernels(inputs); }, "1 of 1 SMs");
}

TEST(KernelChoice, WhatNoKernelTakesIsRefusedWithTheValue) {
  const auto refused = [](const auto& adjust, const char* word) {
    ChoiceInputs inputs = qwen();
    adjust(inputs);
    expect_error(
        ErrorCode::kUnsupported, [&] { choose_kernels(inputs); }, word);
    expect_error(
        ErrorCode::kUnsupported, [&] { check_supported(inputs); }, word);
  };
  refused([](ChoiceInputs& i) { i.hidden_dim = 2044; }, "2044");
  refused([](ChoiceInputs& i) { i.intermediate_dim = 12; }, "12");
  refused([](ChoiceInputs& i) { i.hidden_dim = std::int64_t{1} << 30; }, "1073741824");
  refused([](ChoiceInputs& i) { i.intermediate_dim = std::int64_t{1} << 32; }, "4294967296");
  refused([](ChoiceInputs& i) { i.num_experts = 8193; }, "8193");
  refused([](ChoiceInputs& i) { i.precision = Precision::kMXFP8; }, "mxfp8");
  // Before a device is known.
  ChoiceInputs inputs = qwen();
  inputs.device_sms = 0;
  EXPECT_NO_THROW(check_supported(inputs));
}

// kernel_choice = fixed promises this for itself; today's kernels keep it for both.
TEST(KernelChoice, ArithmeticDependsOnNeitherRanksNorSms) {
  const ProductArithmetic first = choose_kernels(qwen()).arithmetic;
  EXPECT_EQ(first.splits_of_k, 1);
  EXPECT_EQ(first.stage_k % first.instruction_k, 0);
  for (const KernelChoice kind : {KernelChoice::kTuned, KernelChoice::kFixed}) {
    for (const std::int64_t ranks : {1, 2, 3, 4, 64}) {
      for (const std::int64_t sms : {16, 66, 132}) {
        ChoiceInputs inputs = qwen();
        inputs.kernel_choice = kind;
        inputs.num_ranks = ranks;
        inputs.ranks_on_device = std::min<std::int64_t>(ranks, 4);
        inputs.device_sms = sms;
        EXPECT_EQ(choose_kernels(inputs).arithmetic, first);
      }
    }
  }
}

TEST(TileHeights, EveryHeightIsConsideredAndEveryLossHasAReason) {
  const std::vector<TileHeight> heights = tile_heights();
  ASSERT_EQ(heights.size(), kMaxInstructionRows / kTileRowStep);
  std::int32_t rows = 0;
  for (const TileHeight& height : heights) {
    EXPECT_EQ(height.rows, rows += kTileRowStep);
    EXPECT_EQ(height.dropped == Dropped::kNot, height.rows <= kMaxTokensPerTile);
    EXPECT_EQ(height.dropped == Dropped::kSharedMemory, height.shared_bytes > kMaxSharedBytes);
    if (height.dropped == Dropped::kRegisters) {
      EXPECT_GT(height.registers, kConsumerRegisters);
    }
  }
  EXPECT_EQ(heights[160 / kTileRowStep - 1].dropped, Dropped::kRegisters);
  EXPECT_EQ(heights[168 / kTileRowStep - 1].dropped, Dropped::kSharedMemory);
  EXPECT_EQ(heights[kMaxTokensPerTile / kTileRowStep - 1].shared_bytes,
            std::int32_t{sizeof(GemmStorage)});
}

std::int64_t counted_rows(std::int32_t rows, const TokenTiling& tiling) {
  std::int64_t computed = 0;
  for (std::int32_t tile = 0; tile < tiling.num_pairs * kTilesPerPair; ++tile) {
    computed += instruction_rows(tile_span(rows, tiling, tile).count);
  }
  return computed;
}

TEST(RankTilings, TheFirstIsWhatTheDeviceComputes) {
  for (std::int32_t rows = 1; rows <= 4000; ++rows) {
    const std::vector<TilingCandidate> ranked = rank_tilings(rows);
    ASSERT_EQ(ranked.size(), kMaxTokensPerTile / kTileRowStep);
    const TokenTiling device = token_tiling(rows);
    ASSERT_EQ(ranked[0].tiling.num_pairs, device.num_pairs) << rows << " rows";
    ASSERT_EQ(ranked[0].tiling.rows_per_tile, device.rows_per_tile) << rows << " rows";
    ASSERT_EQ(ranked[0].dropped, Dropped::kNot);
    for (std::size_t i = 0; i < ranked.size(); ++i) {
      const TilingCandidate& candidate = ranked[i];
      ASSERT_LE(candidate.tiling.rows_per_tile, candidate.height);
      ASSERT_GE(candidate.computed_rows, rows);
      ASSERT_GE(candidate.cost, ranked[0].cost);
      if (rows % 7 == 0 || rows < 400) {
        ASSERT_EQ(candidate.computed_rows, counted_rows(rows, candidate.tiling))
            << rows << " rows, height " << candidate.height;
      }
      if (i == 0 || candidate.dropped != Dropped::kNot) continue;
      ASSERT_EQ(ranked[i - 1].dropped, Dropped::kNot);
      ASSERT_GE(candidate.cost, ranked[i - 1].cost);
    }
  }
}

TEST(RankTilings, TheLargestGroupIsRankedToo) {
  const std::vector<TilingCandidate> ranked = rank_tilings(INT32_MAX);
  EXPECT_EQ(ranked[0].height, kMaxTokensPerTile);
  EXPECT_GE(ranked[0].computed_rows, INT32_MAX);
}

// Measured: Mixtral loses at every number of tokens up to 128, the others gain from 16 on.
TEST(KernelChoice, PublishingAndRoutingJoinWhereOneBlockCanRoute) {
  ChoiceInputs inputs = qwen();
  EXPECT_FALSE(joins_publish_and_route(inputs, 128));  // no peers
  inputs.num_ranks = 2;
  EXPECT_TRUE(joins_publish_and_route(inputs, 1));
  EXPECT_TRUE(joins_publish_and_route(inputs, 256));
  EXPECT_FALSE(joins_publish_and_route(inputs, 257));  // a second chunk
  inputs.num_ranks = 4;
  EXPECT_TRUE(joins_publish_and_route(inputs, 256));
  inputs.num_ranks = 8;
  EXPECT_TRUE(joins_publish_and_route(inputs, 256));  // 66 KB of ids
  inputs.top_k = 16;
  EXPECT_TRUE(joins_publish_and_route(inputs, 128));
  EXPECT_FALSE(joins_publish_and_route(inputs, 256));
  inputs.top_k = 8;
  inputs.num_ranks = 9;
  EXPECT_FALSE(joins_publish_and_route(inputs, 1));
  inputs.num_ranks = 2;
  inputs.num_experts = 512;
  EXPECT_TRUE(joins_publish_and_route(inputs, 256));
  inputs.num_experts = 2048;
  EXPECT_FALSE(joins_publish_and_route(inputs, 1));  // 128 KB of groups
}

TEST(KernelChoice, CombineMeetsPeersWhereItsBlocksLeaveRoomForWhatPeersWaitFor) {
  ChoiceInputs inputs = qwen();
  const auto joins = [&](std::int64_t tokens) {
    return joins_meeting_and_combine(inputs, choose_kernels(inputs), tokens);
  };
  EXPECT_FALSE(joins(1));
  inputs.num_ranks = 2;
  EXPECT_FALSE(joins(0));
  EXPECT_TRUE(joins(1));
  EXPECT_TRUE(joins(33));
  EXPECT_FALSE(joins(34));
  EXPECT_FALSE(joins(std::int64_t{1} << 60));
  inputs.ranks_on_device = 2;
  EXPECT_FALSE(joins(1));  // 132 blocks compute
  inputs.allowed_sms = 64;
  EXPECT_TRUE(joins(16));
  EXPECT_FALSE(joins(17));
  inputs.allowed_sms = 112;
  EXPECT_TRUE(joins(10));
  EXPECT_FALSE(joins(11));
}

TEST(KernelChoice, W2StartsEarlyWhereItHasManyTiles) {
  ChoiceInputs inputs = qwen();
  ContextChoice choice = choose_kernels(inputs);
  EXPECT_FALSE(starts_w2_early(inputs, choice, 0));
  EXPECT_FALSE(starts_w2_early(inputs, choice, 1));
  EXPECT_TRUE(starts_w2_early(inputs, choice, 16));
  EXPECT_TRUE(starts_w2_early(inputs, choice, 8192));
  inputs.ranks_on_device = 2;
  choice = choose_kernels(inputs);
  EXPECT_FALSE(starts_w2_early(inputs, choice, 8192));

  ChoiceInputs mixtral = qwen();
  mixtral.hidden_dim = 4096;
  mixtral.intermediate_dim = 14336;
  mixtral.num_experts = 8;
  mixtral.top_k = 2;
  choice = choose_kernels(mixtral);
  EXPECT_FALSE(starts_w2_early(mixtral, choice, 128));
  EXPECT_TRUE(starts_w2_early(mixtral, choice, 8192));
}

}  // namespace
}  // namespace distmoe::cuda
