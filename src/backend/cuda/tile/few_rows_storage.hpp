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
inline constexpr int kFewTileTokens = 64;  ///< N of a tile at most
/// M of a tile at most, and what the host chooses from: multiples of a fragment of W13.
inline constexpr int kFewTileWeights = 128;
inline constexpr int kFewTileWeightsStep = 16;
inline constexpr int kFewTileWeightsMin = static_cast<int>(cuda_layout::kFewTileColumns);
/// NOTE: weights on their way hide what it takes an SM to ask for more, and fill the time in which
/// the rows of W2 are not there yet: 128 KiB are 3.8 us of an SM's share of 4.4 TB/s.
inline constexpr int kFewStages = 8;
/// Rows of an expert, on average, up to which a call is one of few rows: more would need several
/// tiles of an expert, which the grouped GEMM does better.
inline constexpr int kFewRowsPerExpert = 32;
/// A group is rows of one expert that fit a tile.
inline constexpr int kFewGroups = kFewExperts + kFewRoutes / kFewTileTokens;

/// Weight rows of a tile, see kFewTileWeights.
struct FewRowsTiles {
  std::int32_t w13_rows = 0;
  std::int32_t w2_rows = 0;
};

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

struct FewRowsGroup {
  std::uint16_t expert;
  std::uint16_t row_begin;
  std::uint16_t num_rows;
};

/// The routing of the call, which every block computes for itself.
struct FewRowsTables {
  static constexpr std::uint16_t kNoRow = 0xFFFF;  ///< of a route with id -1

  std::uint16_t route_of_row[kFewRoutes];
  std::uint16_t row_of_route[kFewRoutes];
  float scores[kFewRoutes];  ///< of a route
  std::uint16_t routes_of_token[kFewRoutes];
  FewRowsGroup groups[kFewGroups];  ///< by expert, then row
  std::int32_t num_rows;
  std::int32_t num_groups;
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
  alignas(1024) std::uint8_t weights[kFewStages][kFewTileWeights * kRowBytes];
  alignas(1024) std::uint8_t tokens[kFewStages][kFewTileTokens * kRowBytes];
  union {
    alignas(128) std::uint8_t staging[kConsumerWarpgroups][2][kStagingBytes];
    FewRowsRoutingScratch routing;
  };
  std::uint64_t result_row[kConsumerWarpgroups][kFewTileTokens];     ///< 0: not stored
  std::int16_t complete_token[kConsumerWarpgroups][kFewTileTokens];  ///< -1: not complete
  FewRowsTables tables;
  FewRowsTile work[kWorkSlots];
  std::uint64_t full[kFewStages];
  std::uint64_t empty[kFewStages];
  std::uint64_t work_full[kWorkSlots];
  std::uint64_t work_empty[kWorkSlots];
  std::uint64_t computed[kConsumerWarpgroups];
};
static_assert(sizeof(FewRowsRoutingScratch) <= sizeof(FewRowsStorage::staging));
static_assert(sizeof(FewRowsStorage) <= kMaxSharedBytes, "shared memory of a Hopper block");

/// What the kernel keeps between calls, zero at first.
struct alignas(128) FewRowsCounters {
  /// Tiles drawn, and in the highest bit the launch's turn, which the last to draw passes on.
  std::uint32_t drawn;
  std::uint32_t reserved[31];
  /// Tiles of W13 that are stored, of each group. Launches take turns, one clears the other's.
  std::uint32_t stored_tiles[2][kFewGroups];
};
static_assert(sizeof(FewRowsCounters) == cuda_layout::kFewRowsCountersBytes);

}  // namespace distmoe::cuda
