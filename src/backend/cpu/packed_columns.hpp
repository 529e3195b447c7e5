// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "formats/bf16.hpp"

namespace distmoe::cpu {

/// The second operand of a product, [depth, columns], as rows of one or two matrices: those of the
/// second follow those of the first.
struct DepthRows {
  const BF16* first = nullptr;
  const BF16* second = nullptr;  ///< null: one matrix
  std::int64_t num_rows = 0;     ///< of each matrix
  std::int64_t num_columns = 0;
  std::int64_t row_stride = 0;

  std::int64_t depth() const { return second == nullptr ? num_rows : 2 * num_rows; }
  const BF16* row(std::int64_t k) const {
    return k < num_rows ? first + k * row_stride : second + (k - num_rows) * row_stride;
  }
};

/// Puts `rows`, at most kCpuPackedColumns columns, in the order in which the library multiplies
/// BF16: blocks of `block_columns` columns, each of blocks of kCpuPackedDepth rows, in which row 2
/// i and row 2 i + 1 alternate. Rows and columns that fill up the last blocks are zero.
void pack_columns(const DepthRows& rows, std::int64_t block_columns, BF16* out);

/// Puts row 2 i and row 2 i + 1 of `rows`, at most kCpuTileColumns columns, in one row of pairs,
/// and zeros where columns up to `width` or a last row are missing.
void pack_row_pairs(const DepthRows& rows, std::int64_t width, BF16* out);

}  // namespace distmoe::cpu
