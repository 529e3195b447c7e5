// SPDX-License-Identifier: Apache-2.0
//
// The matrix products of the CPU backend: rows * weights^T with FP32 sums, on the calling thread.
// oneDNN does the work; this file decides how it is asked. BF16 operands go in as they are where the
// processor multiplies BF16 (AVX-512-BF16, AMX), and are widened to FP32 tile by tile elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "formats/bf16.hpp"
#include "layout/cpu_workspace.hpp"

namespace distmoe::cpu {

/// A row-major matrix of BF16 with a stride between rows, in elements.
struct MatrixView {
  const BF16* data = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t row_stride = 0;
};

/// One worker's workspace, carved from context memory.
struct Workspace {
  float* tile = nullptr;
  float* rows = nullptr;
  float* bias = nullptr;
  void* library_scratch = nullptr;
  float* widened_rows = nullptr;
  float* widened_columns = nullptr;

  Workspace(std::byte* base, const CpuWorkspaceLayout& layout);
};

/// FP32 sums of `num_rows` x `num_columns`; either order lies in memory, see `columns_first`.
struct ProductTile {
  float* data = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t num_columns = 0;
  bool columns_first = false;  ///< element (m, n) at data[n * num_rows + m], else [m * num_columns + n]

  std::int64_t num_elements() const { return num_rows * num_columns; }
};

/// `count` rows of the tile from `first_row` on, row-major without gaps: inside the tile, or turned
/// into `buffer` (FP32 [count * num_columns]).
const float* rows_of(const ProductTile& tile, std::int64_t first_row, std::int64_t count,
                     float* buffer);

enum class MatmulKind { kBF16, kF32 };

/// What products of this process use: the processor's choice, or DISTMOE_CPU_MATMUL.
MatmulKind matmul_kind();
/// For reports: "oneDNN 2.6.3, BF16 operands (avx512_core_bf16)".
std::string describe_matmul();

/// tile(m, n) = sum_k rows(m, k) * weights(n, k), summed in FP32. `rows` has at most kCpuRowBlock
/// rows, `weights` at most kCpuTileColumns. The bits depend on the operands' shapes and values only.
/// `tile_data` has room for rows * weights elements.
ProductTile multiply(const MatrixView& rows, const MatrixView& weights, std::int64_t depth,
                     float* tile_data, const Workspace& workspace);

}  // namespace distmoe::cpu
