// SPDX-License-Identifier: Apache-2.0
//
// What the kernel of few rows (kernels/sm90_bf16_few_rows.hpp) takes at most, and the shared memory
// of one of its blocks. Without CUDA, so that the host chooses with the numbers that the kernel
// has.
#pragma once

#include <cstdint>

#include "backend/cuda/tile/gemm_storage.hpp"
#include "layout/cuda_layout.hpp"

namespace distmoe::cuda {

inline constexpr int kFewRoutes = static_cast<int>(cuda_layout::kFewRoutes);  ///< T * K at most
inline constexpr int kFewExperts = 512;                                       ///< E at most
/// N of a tile at most; the host chooses a power of two from 8 on.
inline constexpr int kFewTileTokens = 64;
inline constexpr int kFewTileTokensMin = 8;
/// M of a tile at most, and what the host chooses from: multiples of a fragment of W13.
inline constexpr int kFewTileWeights = 128;
inline constexpr int kFewTileWeightsStep = 16;
inline constexpr int kFewTileWeightsMin = static_cast<int>(cuda_layout::kFewTileColumns);
/// NOTE: weights on their way hide what it takes an SM to ask for more, and fill the time in which
/// the rows of W2 are not there yet: 128 KiB are 3.8 us of an SM's share of 4.4 TB/s. The ring has
/// as many stages as fit.
inline constexpr int kFewRingBytes = 192 * 1024;
inline constexpr int kFewStagesMax = 16;
/// One token of at most so many routes has them all in one tile of W2, which adds them up, where a
/// block has one such tile of at most so many stages. NOTE: a stage takes as many copies as there
/// are routes, which is too slow for more (H200, DeepSeek-V3, 448 tiles of 32 stages: 197 us
/// instead of 162; Qwen3-30B-A3B, 128 of 12: 25.3 instead of 26.3).
inline constexpr int kOneTokenRoutes = 8;
inline constexpr int kOneTokenStages = 16;
/// Rows of an expert, on average, up to which a call is one of few rows: more would need several
/// tiles of an expert, which the grouped GEMM does better. With peers the rows themselves count.
inline constexpr int kFewRowsPerExpert = 32;
/// Rows of the tiles of a call.
struct FewRowsTiles {
  std::int32_t w13_rows = 0;  ///< of W13
  std::int32_t w2_rows = 0;   ///< of W2, of one expert
  std::int32_t tokens = 0;    ///< at most, of one expert
  /// 1: a tile of W2 has w2_rows rows of the expert of each route of the only token.
  std::int32_t is_one_token = 0;
};

/// The ring of stages: each has weights, then token rows.
struct FewRowsRing {
  std::int32_t num_stages = 0;
  std::int32_t stage_bytes = 0;
  std::int32_t token_offset = 0;
};

/// NOTE: the tensor core reads kFewTileWeights rows of weights, whatever a tile has. Those that are
/// none lie in token rows, in the next stage or in what follows the ring; their sums go nowhere.
constexpr FewRowsRing few_rows_ring(const FewRowsTiles& tiles, std::int32_t top_k) {
  const std::int32_t w2_rows = tiles.is_one_token != 0 ? top_k * tiles.w2_rows : tiles.w2_rows;
  const std::int32_t weights = (tiles.w13_rows > w2_rows ? tiles.w13_rows : w2_rows) * kRowBytes;
  const std::int32_t stage = weights + tiles.tokens * kRowBytes;
  const std::int32_t fit = kFewRingBytes / stage;
  return {fit < kFewStagesMax ? fit : kFewStagesMax, stage, weights};
}

/// What all roles of a block do next.
struct alignas(16) FewRowsTile {
  std::int32_t expert;   ///< -1: nothing is left
  std::int32_t product;  ///< of enum Product
  std::int32_t group;
  std::int32_t weight_tile;
  std::int32_t row_begin;
  std::int32_t num_rows;  ///< > 0
  std::int32_t reserved[2];
};
static_assert(sizeof(FewRowsTile) == 32);

/// The rows of an expert that has some: up to those of the next group.
struct FewRowsGroup {
  std::uint32_t row_begin;
  std::uint32_t expert : 10;
  std::uint32_t first_tile : 22;  ///< tiles of token rows before it
};
static_assert(kFewExperts < 1 << 10);
/// Of the lowest tiles, one of each expert not full.
static_assert(kFewRowsPerExpert * kFewExperts / kFewTileTokensMin + kFewExperts < 1 << 22);
static_assert(sizeof(FewRowsGroup) == 8);

/// The routing of the call, which every block computes or, with peers, reads for itself.
struct FewRowsTables {
  static constexpr std::uint16_t kNoRow = 0xFFFF;  ///< of a route with id -1

  std::uint16_t route_of_row[kFewRoutes];
  std::uint16_t row_of_route[kFewRoutes];
  float scores[kFewRoutes];  ///< of a route
  std::uint16_t routes_of_token[kFewRoutes];
  std::uint16_t expert_of_row[kOneTokenRoutes];  ///< of one token
  FewRowsGroup groups[kFewExperts + 1];          ///< by expert; where they end behind the last one
  std::int32_t num_rows;
  std::int32_t num_groups;
  std::int32_t num_tiles;  ///< of token rows
  std::int32_t bad_route;  ///< the first illegal id's, or none: INT32_MAX
  std::int32_t turn;       ///< 0 or 1: which of the counts of stored tiles are this launch's
};

/// Counts that the tables are made of; gone when the first tile ends.
struct FewRowsRoutingScratch {
  std::uint16_t before[kGemmThreads / 32][kFewExperts];  ///< rows of an expert before a warp's part
  std::uint16_t expert_begin[kFewExperts];
  std::int16_t id_of_route[kFewRoutes];
};

struct FewRowsStorage {
  alignas(1024) std::uint8_t ring[kFewRingBytes];
  union {
    alignas(128) std::uint8_t staging[kConsumerWarpgroups][2][kStagingBytes];
    FewRowsRoutingScratch routing;
  };
  std::uint64_t result_row[kConsumerWarpgroups][kFewTileTokens];     ///< 0: not stored
  std::int16_t complete_token[kConsumerWarpgroups][kFewTileTokens];  ///< -1: not complete
  FewRowsTables tables;
  FewRowsTile work[kWorkSlots];
  std::uint64_t full[kFewStagesMax];
  std::uint64_t empty[kFewStagesMax];
  std::uint64_t work_full[kWorkSlots];
  std::uint64_t work_empty[kWorkSlots];
  std::uint64_t computed[kConsumerWarpgroups];
};
static_assert(sizeof(FewRowsRoutingScratch) <= sizeof(FewRowsStorage::staging));
static_assert(sizeof(FewRowsStorage) <= kMaxSharedBytes, "shared memory of a Hopper block");

/// What the kernel keeps between calls, zero at first. Launches take turns with two sets of counts,
/// one clears the other's.
struct alignas(128) FewRowsCounters {
  /// Tiles drawn, and in the highest bit the launch's turn, which the last to draw passes on.
  std::uint32_t drawn;
  std::uint32_t pulled_rows[2];
  std::uint32_t reserved[29];
  std::uint32_t stored_tiles[2][kFewExperts];  ///< of W13, of each group
};
static_assert(sizeof(FewRowsCounters) == cuda_layout::kFewRowsCountersBytes);

}  // namespace distmoe::cuda
