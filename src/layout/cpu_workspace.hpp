// SPDX-License-Identifier: Apache-2.0
//
// The workspace of one worker thread of the CPU backend: a tile of FP32 sums, what the matrix
// library asks for, and operands widened to FP32 on machines without BF16 products. Its size
// depends on D and F alone, never on the load.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/checked_math.hpp"
#include "distmoe/config.hpp"

namespace distmoe {

/// Rows of one expert in one product, at most: blocks are counted from the expert's first row.
inline constexpr std::int64_t kCpuRowBlock = 512;
/// Output columns of one task. W13 takes half of them from the gate and half from the up rows.
inline constexpr std::int64_t kCpuTileColumns = 512;
/// Operands widened to FP32 at a time.
inline constexpr std::int64_t kCpuWidenedRows = 256;
inline constexpr std::int64_t kCpuWidenedColumns = 128;
/// Columns of weights that a product of a backward takes packed, and the depth to whose multiple
/// they are filled up.
inline constexpr std::int64_t kCpuPackedColumns = 256;
inline constexpr std::int64_t kCpuPackedDepth = 32;
/// Scratchpad of the matrix library; measured needs are under 0.3 MiB (oneDNN 2.6.3).
inline constexpr std::int64_t kCpuLibraryScratchBytes = std::int64_t{2} << 20;

/// Byte offsets of the parts, and the size of the whole.
struct CpuWorkspaceLayout {
  std::int64_t tile = 0;             ///< FP32 [kCpuTileColumns * kCpuRowBlock]
  std::int64_t bias = 0;             ///< FP32 [kCpuTileColumns]
  std::int64_t library_scratch = 0;  ///< kCpuLibraryScratchBytes
  /// FP32 [kCpuWidenedRows * depth] or BF16 [2 * depth * kCpuPackedColumns], depth = max(D, F) up
  /// to a multiple of kCpuPackedDepth
  std::int64_t widened_rows = 0;
  std::int64_t widened_columns = 0;  ///< FP32 [kCpuWidenedColumns * max(D, F)]
  std::int64_t bytes = 0;

  explicit CpuWorkspaceLayout(const Config& config) {
    const std::int64_t depth = std::max(config.hidden_dim, config.intermediate_dim);
    constexpr std::int64_t kFloatBytes = sizeof(float);
    tile = take(kCpuTileColumns * kCpuRowBlock * kFloatBytes);
    bias = take(kCpuTileColumns * kFloatBytes);
    // NOLINTNEXTLINE(cppcoreguidelines-prefer-member-initializer): in the order of memory
    library_scratch = take(kCpuLibraryScratchBytes);
    static_assert(kCpuWidenedRows * kFloatBytes == 2 * kCpuPackedColumns * sizeof(std::uint16_t));
    const std::int64_t packed_depth =
        checked_mul(ceil_div(depth, kCpuPackedDepth), kCpuPackedDepth);
    widened_rows = take(checked_mul(packed_depth, kCpuWidenedRows * kFloatBytes));
    widened_columns = take(checked_mul(depth, kCpuWidenedColumns * kFloatBytes));
  }

 private:
  std::int64_t take(std::int64_t size) {
    const std::int64_t offset = bytes;
    bytes = checked_add(bytes, align_up(size));
    return offset;
  }
};

}  // namespace distmoe
