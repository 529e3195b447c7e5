// SPDX-License-Identifier: Apache-2.0
//
// Sizes of the device-side structs that the memory plan counts; backend/cuda asserts that they are
// those of the structs themselves.
#pragma once

#include <cstdint>

#include "formats/host_device.hpp"

namespace distmoe::cuda_layout {

inline constexpr std::int64_t kIdHeaderBytes = 128;
inline constexpr std::int64_t kFlagBytesPerRank = 8;
inline constexpr std::int64_t kCallStateBytes = 128;
inline constexpr std::int64_t kCallFrameBytes = 256;
inline constexpr std::int64_t kTrainingFrameBytes = 128;
inline constexpr std::int64_t kTileGroupBytes = 32;
inline constexpr std::int64_t kPeerWindowsBytes = 32;
/// Rows of the gather buffer that become ready with one flag.
inline constexpr std::int64_t kGatherChunkRows = 32;
/// Tokens of one source rank that one block of the routing kernels handles.
inline constexpr std::int64_t kRouteChunkTokens = 256;

/// T * K of a call of few rows at most, which one launch makes.
inline constexpr std::int64_t kFewRoutes = 1024;
/// Fewest columns of a tile of such a call's W2.
inline constexpr std::int64_t kFewTileColumns = 64;
inline constexpr std::int64_t kFewRowsCountersBytes = 4224;

/// Rows that the weights' gradients load at once.
inline constexpr std::int64_t kGradientStageRows = 64;

/// Of both products.
DISTMOE_HOST_DEVICE constexpr std::int64_t tile_groups_per_expert(std::int64_t ep_size) {
  return ep_size == 1 ? 2 : 4;
}

}  // namespace distmoe::cuda_layout
