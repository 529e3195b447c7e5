// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/grad_matmul.hpp"

#include <algorithm>

#include "backend/cpu/elementwise.hpp"

namespace distmoe::cpu {
namespace {

/// Rows of FP32 without gaps.
void widen_block(const BF16* data, std::int64_t row_stride, std::int64_t num_rows,
                 std::int64_t num_columns, float* out) {
  for (std::int64_t row = 0; row < num_rows; ++row) {
    widen(data + row * row_stride, out + row * num_columns, num_columns);
  }
}

void dgrad_f32(const MatrixView& rows, const MatrixView& weights, std::int64_t num_columns,
               float* tile, bool accumulates, const Workspace& workspace) {
  const std::int64_t depth = weights.num_rows;
  for (std::int64_t n = 0; n < num_columns; n += kCpuWidenedColumns) {
    const std::int64_t num_n = std::min(kCpuWidenedColumns, num_columns - n);
    widen_block(weights.data + n, weights.row_stride, depth, num_n, workspace.widened_columns);
    for (std::int64_t m = 0; m < rows.num_rows; m += kCpuWidenedRows) {
      const std::int64_t num_m = std::min(kCpuWidenedRows, rows.num_rows - m);
      widen_block(rows.data + m * rows.row_stride, rows.row_stride, num_m, depth,
                  workspace.widened_rows);
      multiply_operands({workspace.widened_rows, num_m, depth, depth},
                        {workspace.widened_columns, num_n, depth, num_n, true},
                        tile + m * num_columns + n, num_columns, accumulates, workspace);
    }
  }
}

/// In chunks of as many rows as the workspace takes, one after the other.
void wgrad_f32(const RowSlab& a, const RowSlab& b, std::int64_t num_rows, float* tile,
               const Workspace& workspace) {
  constexpr std::int64_t kChunkRows = std::min(kCpuWidenedRows, kCpuWidenedColumns);
  for (std::int64_t row = 0; row < num_rows; row += kChunkRows) {
    const std::int64_t count = std::min(kChunkRows, num_rows - row);
    widen_block(a.data + row * a.row_stride, a.row_stride, count, a.num_columns,
                workspace.widened_rows);
    widen_block(b.data + row * b.row_stride, b.row_stride, count, b.num_columns,
                workspace.widened_columns);
    multiply_operands({workspace.widened_rows, a.num_columns, count, a.num_columns, true},
                      {workspace.widened_columns, b.num_columns, count, b.num_columns, true}, tile,
                      b.num_columns, row > 0, workspace);
  }
}

}  // namespace

void multiply_dgrad(const MatrixView& rows, const MatrixView& weights, std::int64_t num_columns,
                    float* tile, bool accumulates, const Workspace& workspace) {
  if (matmul_kind() == MatmulKind::kF32) {
    dgrad_f32(rows, weights, num_columns, tile, accumulates, workspace);
    return;
  }
  read_ahead(weights, num_columns);
  multiply_operands({rows.data, rows.num_rows, weights.num_rows, rows.row_stride},
                    {weights.data, num_columns, weights.num_rows, weights.row_stride, true}, tile,
                    num_columns, accumulates, workspace);
}

// NOTE: for a transposed operand the library takes its general BF16 product, whose code fits every
// number of rows and packs as it goes: 213 GFLOP/s at 128 rows against 218 of the product that the
// forward uses, and no code is generated for a number of rows (oneDNN 2.6.3, Zen 4, one core, 512 x
// 512).
void multiply_wgrad(const RowSlab& a, const RowSlab& b, std::int64_t num_rows, float* tile,
                    const Workspace& workspace) {
  if (matmul_kind() == MatmulKind::kF32) {
    wgrad_f32(a, b, num_rows, tile, workspace);
    return;
  }
  multiply_operands({a.data, a.num_columns, num_rows, a.row_stride, true},
                    {b.data, b.num_columns, num_rows, b.row_stride, true}, tile, b.num_columns,
                    false, workspace);
}

}  // namespace distmoe::cpu
