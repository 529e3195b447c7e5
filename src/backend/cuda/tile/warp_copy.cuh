// SPDX-License-Identifier: Apache-2.0
//
// Bytes of a row from a peer's memory or to it, by a warp.
#pragma once

#include <cstdint>

namespace distmoe::cuda {

inline constexpr int kCopyLaneBytes = 16;
inline constexpr int kCopiesInFlight = 8;  ///< of a lane
inline constexpr int kCopyStepBytes = 32 * kCopyLaneBytes;
/// What a warp has on its way at a time.
inline constexpr int kCopyPieceBytes = kCopiesInFlight * kCopyStepBytes;

/// Copies up to kCopyPieceBytes, a multiple of 16, with all lanes of a warp. Reads go to L2: a peer
/// may have written since this SM looked.
__device__ __forceinline__ void copy_piece(std::uint64_t from, std::uint64_t to, int bytes) {
  const int lane_begin = static_cast<int>(threadIdx.x % 32) * kCopyLaneBytes;
  uint4 values[kCopiesInFlight];
#pragma unroll
  for (int i = 0; i < kCopiesInFlight; ++i) {
    const int at = lane_begin + i * kCopyStepBytes;
    if (at < bytes) values[i] = __ldcg(reinterpret_cast<const uint4*>(from + at));
  }
#pragma unroll
  for (int i = 0; i < kCopiesInFlight; ++i) {
    const int at = lane_begin + i * kCopyStepBytes;
    if (at < bytes) __stcg(reinterpret_cast<uint4*>(to + at), values[i]);
  }
}

/// Copies a row of any multiple of 16 bytes.
__device__ inline void copy_row(std::uint64_t from, std::uint64_t to, int bytes) {
  for (int begin = 0; begin < bytes; begin += kCopyPieceBytes) {
    copy_piece(from + begin, to + begin, min(kCopyPieceBytes, bytes - begin));
  }
}

}  // namespace distmoe::cuda
