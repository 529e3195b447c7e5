// SPDX-License-Identifier: Apache-2.0
//
// What a block of the weights' gradients has: its tile and its shared memory.
#pragma once

#include <cstdint>

#include "backend/cuda/tile/gemm_storage.hpp"

namespace distmoe::cuda {

// A tile's.
inline constexpr int kWgradM = 256;
inline constexpr int kWgradWarpgroupM = kWgradM / kConsumerWarpgroups;
inline constexpr int kWgradN = 128;

/// Operands lie in chunks of a stage's rows and 64 columns.
inline constexpr int kWgradChunkColumns = kRowBytes / 2;
/// Chunks of a that a warpgroup computes with, and that a block loads.
inline constexpr int kWgradChunksA = kWgradWarpgroupM / kWgradChunkColumns;
inline constexpr int kWgradChunksB = kWgradN / kWgradChunkColumns;
static_assert(kWgradChunksA * kClusterBlocks * kWgradChunkColumns == kWgradM);
/// Rows of a stage. NOTE: an expert's last stage is loaded whole. H200, 64 rows and half as many
/// stages: 3 to 6 % slower with 512 rows an expert, 8 % with 256, 1 % with 2048.
inline constexpr int kWgradStageRows = 32;
inline constexpr int kWgradChunkBytes = kWgradStageRows * kRowBytes;
inline constexpr int kWgradStageBytesA = kWgradM / kWgradChunkColumns * kWgradChunkBytes;
inline constexpr int kWgradStageBytesB = kWgradN / kWgradChunkColumns * kWgradChunkBytes;

/// Boxes of a gradient: the 16 rows of a consumer warp, 128 bytes of neighbouring columns.
inline constexpr int kGradientBoxRows = 16;
inline constexpr int kGradientBoxBytes = kGradientBoxRows * kRowBytes;

/// `kWarpBoxes`: of a consumer warp. Stages have the room that boxes leave.
template <int kWarpBoxes>
struct WgradStorage {
  static constexpr int kBoxes = kWarpBoxes;
  static constexpr int kNumStages =
      (kMaxSharedBytes - 1024 - kConsumerWarps * kBoxes * kGradientBoxBytes) /
      (kWgradStageBytesA + kWgradStageBytesB);

  alignas(1024) std::uint8_t a[kNumStages][kWgradStageBytesA];
  alignas(1024) std::uint8_t b[kNumStages][kWgradStageBytesB];
  alignas(1024) std::uint8_t boxes[kConsumerWarps][kBoxes][kGradientBoxBytes];
  std::uint64_t full[kNumStages];
  std::uint64_t empty[kNumStages];
  std::uint64_t added[kConsumerWarps];  ///< of a gradient that is added to
};
static_assert(WgradStorage<2>::kNumStages == 8 && WgradStorage<4>::kNumStages == 6);

}  // namespace distmoe::cuda
