// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the tiles of a range hold each of its rows once and in order, none more rows than the
// kernel's largest tile, and padding stays below one instruction step per tile.
#include "backend/cuda/tile/token_tiling.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

namespace distmoe::cuda {
namespace {

TEST(TokenTiling, HoldsEveryRowOnceAndInOrder) {
  for (std::int32_t rows = 0; rows <= 5000; ++rows) {
    const TokenTiling tiling = token_tiling(rows);
    std::int32_t next = 0;
    for (std::int32_t tile = 0; tile < tiling.num_pairs * kTilesPerPair; ++tile) {
      const TileSpan span = tile_span(rows, tiling, tile);
      ASSERT_GE(span.count, 0) << rows << " rows, tile " << tile;
      ASSERT_LE(span.count, tiling.rows_per_tile) << rows << " rows, tile " << tile;
      if (span.count > 0) {
        ASSERT_EQ(span.begin, next) << rows << " rows, tile " << tile;
      }
      next += span.count;
    }
    ASSERT_EQ(next, rows);
    ASSERT_LE(tiling.rows_per_tile, kMaxTokensPerTile);
  }
}

TEST(TokenTiling, PadsLessThanOneStepInAll) {
  for (const std::int32_t rows : {65 * 2, 257, 321, 516, 1024, 2047, 4096}) {
    const TokenTiling tiling = token_tiling(rows);
    std::int32_t paid = 0;
    for (std::int32_t tile = 0; tile < tiling.num_pairs * kTilesPerPair; ++tile) {
      paid += instruction_rows(tile_span(rows, tiling, tile).count);
    }
    EXPECT_LT(paid - rows, kTileRowStep) << rows << " rows";
  }
}

TEST(TokenTiling, TakesTheFewestPairs) {
  EXPECT_EQ(token_tiling(0).num_pairs, 0);
  EXPECT_EQ(token_tiling(1).num_pairs, 1);
  EXPECT_EQ(token_tiling(304).num_pairs, 1);
  EXPECT_EQ(token_tiling(305).num_pairs, 2);
  EXPECT_EQ(token_tiling(2048).num_pairs, 7);
}

TEST(TokenTiling, LeavesTheSecondBlockEmptyForOneStepOfRows) {
  const TokenTiling tiling = token_tiling(8);
  EXPECT_EQ(tile_span(8, tiling, 0).count, 8);
  EXPECT_EQ(tile_span(8, tiling, 1).count, 0);
  EXPECT_EQ(instruction_rows(0), 0);
}

TEST(TokenTiling, TheLargestGroupEndsWithItsLastRow) {
  constexpr std::int32_t kRows = INT32_MAX;
  const TokenTiling tiling = token_tiling(kRows);
  std::int64_t end = 0;
  for (std::int32_t tile = tiling.num_pairs * kTilesPerPair - 4;
       tile < tiling.num_pairs * kTilesPerPair; ++tile) {
    const TileSpan span = tile_span(kRows, tiling, tile);
    ASSERT_GE(span.begin, 0);
    end = std::max(end, std::int64_t{span.begin} + span.count);
  }
  EXPECT_EQ(end, kRows);
}

}  // namespace
}  // namespace distmoe::cuda
