// SPDX-License-Identifier: Apache-2.0
//
// How a range of one expert's rows is cut into tiles of the grouped GEMM. Weights are the M side of
// the product and token rows the N side, so that a tile has any multiple of eight rows and only
// real rows are paid for. Two neighbouring tiles form a pair: the cluster of two blocks that shares
// weights.
#pragma once

#include <cstdint>

#include "formats/host_device.hpp"

namespace distmoe::cuda {

/// What four stages of shared memory and 216 registers a thread leave room for: 160 spills.
inline constexpr int kMaxTokensPerTile = 152;
inline constexpr int kTilesPerPair = 2;
inline constexpr int kTileRowStep = 8;           ///< of the tensor core's N
inline constexpr int kMaxInstructionRows = 256;  ///< the tensor core's largest N
/// Pairs of one group that take turns on a weight tile before the next one comes.
inline constexpr int kPairsAtATime = 8;
/// What a tile costs beside its rows, in rows. Measured on H200 (D 4096, F 1536).
inline constexpr int kTileOverheadRows = 50;

/// Tiles 2p and 2p + 1 form pair p. The first tiles hold `rows_per_tile` rows, the others
/// kTileRowStep fewer, the last one what is left.
struct TokenTiling {
  std::int32_t num_pairs = 0;
  std::int32_t rows_per_tile = 0;
};

/// ceil(count / part) of count > 0, without a sum that could overflow.
DISTMOE_HOST_DEVICE constexpr std::int32_t parts_of(std::int32_t count, std::int32_t part) {
  return (count - 1) / part + 1;
}

/// `num_rows` > 0 rows over `num_pairs` > 0 pairs, as evenly as steps of eight allow.
DISTMOE_HOST_DEVICE constexpr TokenTiling spread_rows(std::int32_t num_rows,
                                                      std::int32_t num_pairs) {
  return {num_pairs,
          parts_of(parts_of(num_rows, kTileRowStep), num_pairs * kTilesPerPair) * kTileRowStep};
}

/// The fewest pairs that hold `num_rows` rows. A tile costs as much as its rows and
/// kTileOverheadRows more, so that fewer and larger tiles win: select/kernel_choice.hpp ranks them.
DISTMOE_HOST_DEVICE constexpr TokenTiling token_tiling(std::int32_t num_rows) {
  constexpr std::int32_t kMaxPairRows = kTilesPerPair * kMaxTokensPerTile;
  if (num_rows <= 0) return {};
  return spread_rows(num_rows, parts_of(num_rows, kMaxPairRows));
}

/// Rows of a tile, counted from the range's first.
struct TileSpan {
  std::int32_t begin = 0;
  std::int32_t count = 0;
};

DISTMOE_HOST_DEVICE constexpr TileSpan tile_span(std::int32_t num_rows, const TokenTiling& tiling,
                                                 std::int32_t tile) {
  const std::int32_t steps = parts_of(num_rows, kTileRowStep);
  const std::int32_t short_steps = tiling.rows_per_tile / kTileRowStep - 1;
  const std::int32_t num_long = steps - tiling.num_pairs * kTilesPerPair * short_steps;
  const std::int32_t begin_step = tile * short_steps + (tile < num_long ? tile : num_long);
  if (begin_step >= steps) return {num_rows, 0};
  const std::int32_t begin = begin_step * kTileRowStep;
  const std::int32_t room = (short_steps + (tile < num_long ? 1 : 0)) * kTileRowStep;
  const std::int32_t left = num_rows - begin;
  return {begin, room < left ? room : left};
}

/// N of the instruction that covers `rows` rows: steps of 16 up to 64, where weights bound a tile,
/// so that there are fewer kinds; 0 for none.
DISTMOE_HOST_DEVICE constexpr std::int32_t instruction_rows(std::int32_t rows) {
  const std::int32_t step = rows > 8 && rows <= 64 ? 16 : 8;
  return (rows + step - 1) / step * step;
}

}  // namespace distmoe::cuda
