// SPDX-License-Identifier: Apache-2.0
//
// What a block of the weights' gradients has: its tile and its shared memory.
#pragma once

#include <cstdint>

#include "backend/cuda/tile/gemm_storage.hpp"

namespace distmoe::cuda {

inline constexpr int kWgradM = 256;  ///< of a tile
inline constexpr int kWgradWarpgroupM = kWgradM / kConsumerWarpgroups;
inline constexpr int kWgradN = 128;                           ///< of a tile
inline constexpr int kWgradChunkBytes = kStageK * kRowBytes;  ///< 64 rows of 64 columns
/// Chunks of a that a warpgroup computes with, and that a block loads.
inline constexpr int kWgradChunksA = kWgradWarpgroupM / kStageK;
inline constexpr int kWgradChunksB = kWgradN / kStageK;
static_assert(kWgradChunksA * kClusterBlocks * kStageK == kWgradM);
inline constexpr int kWgradStageBytesA = kWgradM * kRowBytes;
inline constexpr int kWgradStageBytesB = kWgradN * kRowBytes;

/// Where a warpgroup stages a part of its tile for one bulk store: boxes of 64 rows x 128 bytes.
inline constexpr int kGradientBoxRows = 64;
inline constexpr int kGradientBoxBytes = kGradientBoxRows * kRowBytes;
inline constexpr int kGradientBoxes = 2;

struct WgradStorage {
  alignas(1024) std::uint8_t a[kStages][kWgradStageBytesA];
  alignas(1024) std::uint8_t b[kStages][kWgradStageBytesB];
  alignas(1024) std::uint8_t staging[kConsumerWarpgroups][kGradientBoxes * kGradientBoxBytes];
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
};
static_assert(sizeof(WgradStorage) <= kMaxSharedBytes, "shared memory of a Hopper block");

}  // namespace distmoe::cuda
