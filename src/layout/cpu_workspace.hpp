// SPDX-License-Identifier: Apache-2.0
//
// The workspace of one worker thread of the CPU backend: a tile of FP32 sums, what the matrix
// library asks for, operands widened to FP32 on machines without BF16 products, and those that are
// decoded from codes to BF16. Its size depends on the configuration alone, never on the load.
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
/// Columns of a weight's rows, or rows of a weight's columns, that are quantised and decoded at a
/// time where the weight is not prepared: those of one band of scales.
inline constexpr std::int64_t kCpuQuantisedRows = 32;
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
  // Of precisions with codes; depth = max(D, F), 2F in training where it is more, kCpuRowBlock at
  // least.
  std::int64_t decoded_rows = 0;     ///< BF16 [kCpuRowBlock * depth]
  std::int64_t decoded_weights = 0;  ///< BF16 [kCpuPackedColumns * depth]
  std::int64_t codes = 0;            ///< codes and scales of [kCpuQuantisedRows * depth]
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
    if (config.precision == Precision::kBF16) return;
    constexpr std::int64_t kBF16Bytes = sizeof(std::uint16_t);
    const std::int64_t longest = std::max(
        {depth, config.inference ? 0 : checked_mul(2, config.intermediate_dim), kCpuRowBlock});
    decoded_rows = take(checked_mul(longest, kCpuRowBlock * kBF16Bytes));
    decoded_weights = take(checked_mul(longest, kCpuPackedColumns * kBF16Bytes));
    // A byte an element at most, and a scale for every block of 16 or more.
    codes = take(checked_mul(longest, kCpuQuantisedRows + kCpuQuantisedRows / 16));
  }

 private:
  std::int64_t take(std::int64_t size) {
    const std::int64_t offset = bytes;
    bytes = checked_add(bytes, align_up(size));
    return offset;
  }
};

}  // namespace distmoe
