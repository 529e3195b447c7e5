// SPDX-License-Identifier: Apache-2.0
//
// The matrix products of the CPU backend: rows * weights^T with FP32 sums, on the calling thread.
// oneDNN does the work; this file decides how it is asked. BF16 operands go in as they are where
// the processor multiplies BF16 (AVX-512-BF16, AMX), and are widened to FP32 tile by tile
// elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "backend/cpu/packed_columns.hpp"
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
  float* bias = nullptr;
  void* library_scratch = nullptr;
  float* widened_rows = nullptr;
  float* widened_columns = nullptr;
  // Of precisions with codes.
  BF16* decoded_rows = nullptr;
  BF16* decoded_weights = nullptr;
  std::byte* codes = nullptr;

  Workspace(std::byte* base, const CpuWorkspaceLayout& layout);
};

enum class MatmulKind { kBF16, kF32 };

/// What products of this process use: the processor's choice, or DISTMOE_CPU_MATMUL.
MatmulKind matmul_kind();
/// For reports: "oneDNN 2.6.3, BF16 operands (avx512_core_bf16)".
std::string describe_matmul();

/// tile[m * weights.num_rows + n] = sum_k rows(m, k) * weights(n, k), summed in FP32. `rows` has at
/// most kCpuRowBlock rows, `weights` at most kCpuTileColumns. The bits depend on the operands'
/// shapes and values only, and on whether `rows` has gaps.
void multiply(const MatrixView& rows, const MatrixView& weights, std::int64_t depth, float* tile,
              const Workspace& workspace);

/// An operand in the library's own type, BF16 or FP32 as matmul_kind() says: `num_outer` rows (of
/// a) or columns (of b) of the result by `depth`. Element (outer, k) is data[outer * stride + k],
/// or data[k * stride + outer] where it lies by depth.
struct StridedOperand {
  const void* data = nullptr;
  std::int64_t num_outer = 0;
  std::int64_t depth = 0;
  std::int64_t stride = 0;
  bool is_by_depth = false;
};

/// out[m * out_stride + n] = sum_k a(m, k) * b(n, k), summed in FP32; with `accumulates` the sum is
/// added to what is there. The bits depend on the operands' shapes and values only, and on whether
/// both are without gaps.
void multiply_operands(const StridedOperand& a, const StridedOperand& b, float* out,
                       std::int64_t out_stride, bool accumulates, const Workspace& workspace);

/// The same of BF16, in a processor that multiplies it, with a(m, k) = a[m * a_stride + k], and
/// b(n, k) = the columns of `b`, at most kCpuPackedColumns: out[m * b.num_columns + n]. They are
/// packed first, so that the bits do not depend on the stride of b either.
void multiply_packed(const BF16* a, std::int64_t num_rows, std::int64_t a_stride,
                     const DepthRows& b, float* out, const Workspace& workspace);

}  // namespace distmoe::cpu
