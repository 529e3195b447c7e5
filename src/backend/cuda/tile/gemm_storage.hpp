// SPDX-License-Identifier: Apache-2.0
//
// What a block of the grouped GEMM has: its tile, threads and registers, and its shared memory: a
// ring of operand stages, the epilogue's staging, the ring of work that the scheduler hands out,
// and their barriers. Without CUDA, so that the host chooses with the numbers that the kernel has.
#pragma once

#include <cstdint>

#include "backend/cuda/tile/token_tiling.hpp"

namespace distmoe::cuda {

inline constexpr int kClusterBlocks = kTilesPerPair;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kConsumerWarpgroups = 2;
inline constexpr int kConsumerWarps = kConsumerWarpgroups * kWarpgroupThreads / 32;
inline constexpr int kGatherWarps = 3;
inline constexpr int kGatherThreads = kGatherWarps * 32;
inline constexpr int kGemmThreads = kWarpgroupThreads * (1 + kConsumerWarpgroups);

inline constexpr int kWeightRows = 256;  ///< M of a tile
inline constexpr int kWeightRowsPerWarpgroup = kWeightRows / kConsumerWarpgroups;
inline constexpr int kWeightRowsPerBlock = kWeightRows / kClusterBlocks;  ///< that a block loads
inline constexpr int kStageK = 64;                                        ///< elements: 128 bytes
inline constexpr int kInstructionK = 16;                                  ///< of one wgmma
inline constexpr int kRowBytes = kStageK * 2;
inline constexpr int kStages = 4;
inline constexpr int kWeightStageBytes = kWeightRows * kRowBytes;
inline constexpr int kTokenStageBytes = kMaxTokensPerTile * kRowBytes;
/// Rows that the passes of an epilogue look at: whole passes of up to 32.
constexpr int padded_result_rows(int token_rows) { return (token_rows + 31) / 32 * 32; }
inline constexpr int kResultRows = padded_result_rows(kMaxTokensPerTile);
inline constexpr int kStagingBytes = 4096;  ///< of one epilogue pass of a warpgroup
inline constexpr int kWorkSlots = 4;

// Limits of a Hopper SM and of a block on it.
inline constexpr int kMaxSharedBytes = 227 * 1024;
inline constexpr int kRegistersPerSm = 65536;

inline constexpr int kProducerRegisters = 72;
inline constexpr int kConsumerRegisters = 216;
/// Of a consumer thread beside its accumulators, one a token row. NOTE: 160 token rows leave 56 of
/// 216, and the kernel spills.
inline constexpr int kRegistersBesideAccumulators = kConsumerRegisters - kMaxTokensPerTile;
static_assert(kWarpgroupThreads * (kProducerRegisters + kConsumerWarpgroups * kConsumerRegisters) <=
                  kRegistersPerSm,
              "registers of an SM");

/// What all roles of a block do next; the other block of the cluster has the same weights.
struct alignas(16) TileWork {
  std::int32_t expert;  ///< -1: nothing is left
  std::int32_t weight_row;
  std::int32_t row_begin;
  std::int32_t num_rows;  ///< 0: only the cluster's other block has rows
  std::int32_t needs_gather;
  std::int32_t reserved[3];
};
static_assert(sizeof(TileWork) == 32);

struct GemmStorage {
  static constexpr int kNumStages = kStages;

  alignas(1024) std::uint8_t weights[kStages][kWeightStageBytes];
  alignas(1024) std::uint8_t tokens[kStages][kTokenStageBytes];
  alignas(128) std::uint8_t staging[kConsumerWarpgroups][2][kStagingBytes];
  std::uint64_t result_row[kConsumerWarpgroups][kResultRows];  ///< 0: not stored
  TileWork work[kWorkSlots];
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
  std::uint64_t work_full[kWorkSlots];
  std::uint64_t work_empty[kWorkSlots];  ///< used in the leading block only
  std::int32_t pulled_chunk;             ///< drawn by a pulling block
};
static_assert(kTokenStageBytes % 1024 == 0, "stages hold whole swizzle atoms");
static_assert(sizeof(GemmStorage) <= kMaxSharedBytes, "shared memory of a Hopper block");

}  // namespace distmoe::cuda
