// SPDX-License-Identifier: Apache-2.0
//
// How the rows of one expert are cut into tiles of the grouped GEMM. Weights are the M side of the
// product and token rows the N side, so that a tile has any multiple of eight rows and only real
// rows are paid for. Two neighbouring tiles form a pair: the cluster of two blocks that shares
// weights.
#pragma once

#include <cstdint>

#include "formats/host_device.hpp"

namespace distmoe::cuda {

inline constexpr int kMaxTokensPerTile = 160;
inline constexpr int kTilesPerPair = 2;

/// Tiles 2p and 2p + 1 of pair p hold `rows_per_tile` rows each, the last ones fewer or none.
struct TokenTiling {
  std::int32_t num_pairs = 0;
  std::int32_t rows_per_tile = 0;
};

namespace detail {

/// Rows of the wgmma instruction that covers `rows`: steps of 16 where weights bound the tile.
DISTMOE_HOST_DEVICE constexpr std::int32_t instruction_rows(std::int32_t rows) {
  const std::int32_t step = rows > 8 && rows <= 64 ? 16 : 8;
  return (rows + step - 1) / step * step;
}

/// Time of a tile relative to a row of it: the fixed part is the tile's fill and epilogue.
DISTMOE_HOST_DEVICE constexpr std::int32_t tile_cost(std::int32_t rows_per_tile) {
  constexpr std::int32_t kFixed = 16;
  constexpr std::int32_t kWeightBound = 64;
  return (rows_per_tile > kWeightBound ? rows_per_tile : kWeightBound) + kFixed;
}

}  // namespace detail

/// The cheapest equal split of `num_rows` rows; no pairs for no rows.
DISTMOE_HOST_DEVICE constexpr TokenTiling token_tiling(std::int32_t num_rows) {
  constexpr std::int32_t kMaxPairRows = kTilesPerPair * kMaxTokensPerTile;
  constexpr std::int32_t kCandidates = 3;
  TokenTiling best;
  std::int64_t best_cost = 0;
  const std::int32_t fewest = (num_rows + kMaxPairRows - 1) / kMaxPairRows;
  for (std::int32_t pairs = fewest; num_rows > 0 && pairs < fewest + kCandidates; ++pairs) {
    const std::int32_t tiles = pairs * kTilesPerPair;
    const std::int32_t rows = detail::instruction_rows((num_rows + tiles - 1) / tiles);
    const std::int64_t cost = static_cast<std::int64_t>(pairs) * detail::tile_cost(rows);
    if (best.num_pairs == 0 || cost < best_cost) {
      best = {pairs, rows};
      best_cost = cost;
    }
  }
  return best;
}

}  // namespace distmoe::cuda
