// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/packed_columns.hpp"

#include <algorithm>
#include <array>

#include "core/checked_math.hpp"
#include "core/simd.hpp"
#include "layout/cpu_workspace.hpp"

namespace distmoe::cpu {
namespace {

/// Of what is not there.
constexpr std::array<BF16, kCpuTileColumns> kZeros{};
static_assert(kCpuPackedColumns <= kCpuTileColumns);

/// Rows r0 and r1, alternating, `block_columns` columns to a block; blocks are `block_stride`
/// apart.
DISTMOE_SIMD_CLONES
void pack_pair(const BF16* __restrict__ r0, const BF16* __restrict__ r1, std::int64_t num_columns,
               std::int64_t block_columns, std::int64_t block_stride, BF16* __restrict__ out) {
  for (std::int64_t column = 0; column < num_columns; column += block_columns) {
    const std::int64_t rest = num_columns - column;
    const std::int64_t count = block_columns < rest ? block_columns : rest;
    for (std::int64_t i = 0; i < count; ++i) {
      out[2 * i].bits = r0[column + i].bits;
      out[2 * i + 1].bits = r1[column + i].bits;
    }
    for (std::int64_t i = 2 * count; i < 2 * block_columns; ++i) out[i].bits = 0;
    out += block_stride;
  }
}

void prefetch_row(const BF16* row, std::int64_t num_columns) {
  constexpr std::int64_t kLine = 64 / sizeof(BF16);
  for (std::int64_t column = 0; column < num_columns; column += kLine) {
    __builtin_prefetch(row + column);
  }
}

}  // namespace

// NOTE: the columns of a slab are short pieces of long rows, which the processor does not see
// coming. Eight rows ahead, and nothing but pairs of rows to alternate, 201 MB of weights that lie
// in memory are packed in 17 ms, and 32 with a call for every block; to read them alone takes 9
// (one core of Zen 4, 256 of 2048 columns).
void pack_columns(const DepthRows& rows, std::int64_t block_columns, BF16* out) {
  constexpr std::int64_t kRowsAhead = 8;
  const std::int64_t depth = rows.depth();
  const std::int64_t padded_depth = ceil_div(depth, kCpuPackedDepth) * kCpuPackedDepth;
  const std::int64_t block_stride = padded_depth * block_columns;
  for (std::int64_t k = 0; k < padded_depth; k += 2) {
    for (std::int64_t ahead = k + kRowsAhead; ahead < std::min(k + kRowsAhead + 2, depth);
         ++ahead) {
      prefetch_row(rows.row(ahead), rows.num_columns);
    }
    pack_pair(k < depth ? rows.row(k) : kZeros.data(),
              k + 1 < depth ? rows.row(k + 1) : kZeros.data(), rows.num_columns, block_columns,
              block_stride, out + k * block_columns);
  }
}

void pack_row_pairs(const DepthRows& rows, std::int64_t width, BF16* out) {
  for (std::int64_t k = 0; k < rows.depth(); k += 2) {
    pack_pair(rows.row(k), k + 1 < rows.depth() ? rows.row(k + 1) : kZeros.data(), rows.num_columns,
              width, 0, out + k * width);
  }
}

}  // namespace distmoe::cpu
