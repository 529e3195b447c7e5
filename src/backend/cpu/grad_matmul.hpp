// SPDX-License-Identifier: Apache-2.0
//
// The matrix products of a backward, with FP32 sums on the calling thread, over matmul.hpp.
// Operands are BF16 and row-major; where the processor multiplies FP32 alone they are widened tile
// by tile.
#pragma once

#include <cstdint>

#include "backend/cpu/matmul.hpp"

namespace distmoe::cpu {

/// DGRAD: tile[m * weights.num_columns + n] = sum_k rows(m, k) * weights(k, n). At most
/// kCpuRowBlock rows and kCpuPackedColumns columns. The weights' stride changes no bit.
void multiply_dgrad(const MatrixView& rows, const DepthRows& weights, float* tile,
                    const Workspace& workspace);

/// Some columns of the rows of one expert.
struct RowSlab {
  const BF16* data = nullptr;
  std::int64_t num_columns = 0;
  std::int64_t row_stride = 0;
};

/// WGRAD: tile[m * b.num_columns + n] = sum over rows of a(row, m) * b(row, n), in the order of
/// rows as far as the library's blocks go; with `accumulates` added to what is there. At least one
/// row; at most kCpuRowBlock columns of `a` and kCpuTileColumns of `b`.
void multiply_wgrad(const RowSlab& a, const RowSlab& b, std::int64_t num_rows, float* tile,
                    bool accumulates, const Workspace& workspace);

}  // namespace distmoe::cpu
