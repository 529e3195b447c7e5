// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/grad_matmul.hpp"

#include <algorithm>

#include "backend/cpu/elementwise.hpp"
#include "backend/cpu/few_row_products.hpp"

namespace distmoe::cpu {
namespace {

/// Rows of FP32 without gaps.
void widen_block(const BF16* data, std::int64_t row_stride, std::int64_t num_rows,
                 std::int64_t num_columns, float* out) {
  for (std::int64_t row = 0; row < num_rows; ++row) {
    widen(data + row * row_stride, out + row * num_columns, num_columns);
  }
}

/// One matrix of the weights, whose sums come after those of the other.
void dgrad_f32(const MatrixView& rows, const BF16* weights, const DepthRows& shape, float* tile,
               bool accumulates, const Workspace& workspace) {
  const std::int64_t depth = shape.num_rows;
  for (std::int64_t n = 0; n < shape.num_columns; n += kCpuWidenedColumns) {
    const std::int64_t num_n = std::min(kCpuWidenedColumns, shape.num_columns - n);
    widen_block(weights + n, shape.row_stride, depth, num_n, workspace.widened_columns);
    for (std::int64_t m = 0; m < rows.num_rows; m += kCpuWidenedRows) {
      const std::int64_t num_m = std::min(kCpuWidenedRows, rows.num_rows - m);
      widen_block(rows.data + m * rows.row_stride, rows.row_stride, num_m, depth,
                  workspace.widened_rows);
      multiply_operands({workspace.widened_rows, num_m, depth, depth},
                        {workspace.widened_columns, num_n, depth, num_n, true},
                        tile + m * shape.num_columns + n, shape.num_columns, accumulates,
                        workspace);
    }
  }
}

/// In chunks of as many rows as the workspace takes, one after the other.
void wgrad_f32(const RowSlab& a, const RowSlab& b, std::int64_t num_rows, float* tile,
               bool accumulates, const Workspace& workspace) {
  constexpr std::int64_t kChunkRows = std::min(kCpuWidenedRows, kCpuWidenedColumns);
  for (std::int64_t row = 0; row < num_rows; row += kChunkRows) {
    const std::int64_t count = std::min(kChunkRows, num_rows - row);
    widen_block(a.data + row * a.row_stride, a.row_stride, count, a.num_columns,
                workspace.widened_rows);
    widen_block(b.data + row * b.row_stride, b.row_stride, count, b.num_columns,
                workspace.widened_columns);
    multiply_operands({workspace.widened_rows, a.num_columns, count, a.num_columns, true},
                      {workspace.widened_columns, b.num_columns, count, b.num_columns, true}, tile,
                      b.num_columns, accumulates || row > 0, workspace);
  }
}

}  // namespace

// NOTE: the library's product of columns that lie by depth packs them as it goes, in short pieces
// of long rows. Packed here, 128 rows x 256 columns x depth 2048 run at 191 instead of 171 GFLOP/s
// and of depth 1536, gate and up in one product, at 197 instead of 177; 512 rows at 213 instead of
// 190; packed before, at 229 (oneDNN 2.6.3, one core of Zen 4, weights in memory).
void multiply_dgrad(const MatrixView& rows, const DepthRows& weights, float* tile,
                    const Workspace& workspace) {
  if (rows.num_rows <= kFewRows && has_few_row_products()) {
    multiply_few_rows_dgrad(rows, weights, tile);
    return;
  }
  if (matmul_kind() == MatmulKind::kBF16) {
    multiply_packed(rows.data, rows.num_rows, rows.row_stride, weights, tile, workspace);
    return;
  }
  dgrad_f32(rows, weights.first, weights, tile, false, workspace);
  if (weights.second == nullptr) return;
  dgrad_f32({rows.data + weights.num_rows, rows.num_rows, rows.row_stride}, weights.second, weights,
            tile, true, workspace);
}

// NOTE: for a transposed operand the library takes its general BF16 product, whose code fits every
// number of rows and packs as it goes: 213 GFLOP/s at 128 rows against 218 of the product that the
// forward uses, and no code is generated for a number of rows (oneDNN 2.6.3, Zen 4, one core, 512 x
// 512).
void multiply_wgrad(const RowSlab& a, const RowSlab& b, std::int64_t num_rows, float* tile,
                    bool accumulates, const Workspace& workspace) {
  if (matmul_kind() == MatmulKind::kF32) {
    wgrad_f32(a, b, num_rows, tile, accumulates, workspace);
    return;
  }
  multiply_operands({a.data, a.num_columns, num_rows, a.row_stride, true},
                    {b.data, b.num_columns, num_rows, b.row_stride, true}, tile, b.num_columns,
                    accumulates, workspace);
}

}  // namespace distmoe::cpu
