// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/matmul.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <oneapi/dnnl/dnnl.hpp>

#include "backend/cpu/elementwise.hpp"
#include "backend/cpu/library_product.hpp"
#include "core/check.hpp"
#include "core/checked_math.hpp"
#include "core/environment.hpp"

namespace distmoe::cpu {
namespace {

using dnnl::memory;

/// While it lives, the matrix library stays on the calling thread. oneDNN asks the OpenMP runtime
/// that it was built with, whose setting is the thread's own and may be the caller's: it is put
/// back.
class SingleThreaded {
 public:
  SingleThreaded() {
    if (set_num_threads() == nullptr || get_max_threads() == nullptr) return;
    previous_ = get_max_threads()();
    if (previous_ != 1) set_num_threads()(1);
  }
  ~SingleThreaded() {
    if (previous_ > 1) set_num_threads()(previous_);
  }
  SingleThreaded(const SingleThreaded&) = delete;
  SingleThreaded& operator=(const SingleThreaded&) = delete;

 private:
  using SetNumThreads = void (*)(int);
  using GetMaxThreads = int (*)();
  static SetNumThreads set_num_threads() {
    static const auto function =
        reinterpret_cast<SetNumThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
    return function;
  }
  static GetMaxThreads get_max_threads() {
    static const auto function =
        reinterpret_cast<GetMaxThreads>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
    return function;
  }

  int previous_ = 0;
};

// NOTE: the rows of x are `a`. Swapped, the rows would fill vector registers and the library would
// pack them instead of the weights: 215 against 206 GFLOP/s at 128 rows, but 170 against 207 at 129
// and 69 against 137 at 24, and routing brings any number (oneDNN 2.6.3, Zen 4, one core, 512
// columns, depth 2048).
void run_product(memory::data_type type, const StridedOperand& a, const StridedOperand& b,
                 float* out, std::int64_t out_stride, bool accumulates,
                 const Workspace& workspace) {
  LibraryProduct& product = product_of({.type = type,
                                        .a_rows = a.num_outer,
                                        .b_rows = b.num_outer,
                                        .depth = a.depth,
                                        .a_stride = a.stride,
                                        .b_stride = b.stride,
                                        .out_stride = out_stride,
                                        .a_is_by_depth = a.is_by_depth,
                                        .b_is_by_depth = b.is_by_depth,
                                        .accumulates = accumulates});
  product.run(a.data, b.data, out, workspace.library_scratch);
}

/// Rows of weights without gaps, copied where they have some.
// NOTE: for rows with gaps, of interleaved gate and up among them, the library takes another
// product, with other last bits. Copied, 24 rows x 256 columns x depth 2048 run at 105 instead of
// 76 GFLOP/s, 128 rows at 188 instead of 162, one row at 8 instead of 13 (oneDNN 2.6.3, Zen 4, one
// core). BF16 products leave the place of widened rows free: kCpuTileColumns rows of BF16.
StridedOperand dense_rows(const MatrixView& weights, std::int64_t depth,
                          const Workspace& workspace) {
  static_assert(kCpuTileColumns * sizeof(BF16) <= kCpuWidenedRows * sizeof(float));
  if (weights.row_stride == depth) return {weights.data, weights.num_rows, depth, depth};
  auto* copy = reinterpret_cast<BF16*>(workspace.widened_rows);
  for (std::int64_t row = 0; row < weights.num_rows; ++row) {
    std::copy_n(weights.data + row * weights.row_stride, depth, copy + row * depth);
  }
  return {copy, weights.num_rows, depth, depth};
}

// NOTE: the library reads the weights while it packs them, from few places at a time, and waits for
// memory: with weights that are read first in four streams a product of 128 rows x 256 columns x
// depth 768 ran at 401 instead of 370 GFLOP/s, of depth 2048 at 409 instead of 404 (oneDNN 2.6.3,
// two cores of Zen 4, weights in memory).
/// Brings rows of `num_columns` elements into the cache, before a product waits for them.
void read_ahead(const MatrixView& matrix, std::int64_t num_columns) {
  constexpr std::int64_t kStreams = 4;
  constexpr std::int64_t kLine = 64 / sizeof(BF16);
  const std::int64_t rows_per_stream = ceil_div(matrix.num_rows, kStreams);
  for (std::int64_t row = 0; row < rows_per_stream; ++row) {
    for (std::int64_t column = 0; column < num_columns; column += kLine) {
      for (std::int64_t m = row; m < matrix.num_rows; m += rows_per_stream) {
        const BF16* line = matrix.data + m * matrix.row_stride + column;
        static_cast<void>(*reinterpret_cast<const volatile unsigned char*>(line));
      }
    }
  }
}

void multiply_bf16(const MatrixView& rows, const MatrixView& weights, std::int64_t depth,
                   float* tile, const Workspace& workspace) {
  const StridedOperand x{rows.data, rows.num_rows, depth, rows.row_stride};
  read_ahead(weights, depth);
  const StridedOperand w = dense_rows(weights, depth, workspace);
  run_product(memory::data_type::bf16, x, w, tile, weights.num_rows, false, workspace);
}

StridedOperand widen_rows(const MatrixView& matrix, std::int64_t first, std::int64_t count,
                          std::int64_t depth, float* out) {
  for (std::int64_t row = 0; row < count; ++row) {
    widen(matrix.data + (first + row) * matrix.row_stride, out + row * depth, depth);
  }
  return {out, count, depth, depth};
}

/// The same in FP32: blocks of kCpuWidenedColumns weights times blocks of kCpuWidenedRows rows.
void multiply_f32(const MatrixView& rows, const MatrixView& weights, std::int64_t depth,
                  float* tile, const Workspace& workspace) {
  for (std::int64_t m = 0; m < rows.num_rows; m += kCpuWidenedRows) {
    const std::int64_t num_m = std::min(kCpuWidenedRows, rows.num_rows - m);
    const StridedOperand x = widen_rows(rows, m, num_m, depth, workspace.widened_rows);
    for (std::int64_t n = 0; n < weights.num_rows; n += kCpuWidenedColumns) {
      const std::int64_t num_n = std::min(kCpuWidenedColumns, weights.num_rows - n);
      const StridedOperand w = widen_rows(weights, n, num_n, depth, workspace.widened_columns);
      run_product(memory::data_type::f32, x, w, tile + m * weights.num_rows + n, weights.num_rows,
                  false, workspace);
    }
  }
}

/// Whether the library multiplies BF16 by the processor's own instructions: what it answers heeds
/// its own environment variables too. The names of instruction sets are sets of bits.
bool has_bf16_products() {
  const auto effective = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto needed = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (effective & needed) == needed;
}

MatmulKind choose_kind() {
  const std::string& forced = environment().cpu_matmul;
  if (!forced.empty()) return forced == "bf16" ? MatmulKind::kBF16 : MatmulKind::kF32;
  return has_bf16_products() ? MatmulKind::kBF16 : MatmulKind::kF32;
}

/// Runs products on the calling thread alone, with the library's errors as the project's.
template <typename Products>
void with_library(std::int64_t m, std::int64_t n, std::int64_t k, const Products& products) {
  const SingleThreaded single_threaded;
  try {
    products();
  } catch (const dnnl::error& error) {
    const bool out_of_memory = error.status == dnnl_out_of_memory;
    throw_error(out_of_memory ? ErrorCode::kOutOfMemory : ErrorCode::kInternal,
                concat("the matrix library failed on a product of ", m, " x ", n, " x ", k, ": ",
                       error.what()));
  }
}

const char* instruction_set() {
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::sse41: return "sse41";
    case dnnl::cpu_isa::avx: return "avx";
    case dnnl::cpu_isa::avx2: return "avx2";
    case dnnl::cpu_isa::avx2_vnni: return "avx2_vnni";
    case dnnl::cpu_isa::avx512_core: return "avx512_core";
    case dnnl::cpu_isa::avx512_core_vnni: return "avx512_core_vnni";
    case dnnl::cpu_isa::avx512_core_bf16: return "avx512_core_bf16";
    case dnnl::cpu_isa::avx512_core_amx: return "avx512_core_amx";
    default: return "the processor's own";
  }
}

}  // namespace

Workspace::Workspace(std::byte* base, const CpuWorkspaceLayout& layout)
    : tile(reinterpret_cast<float*>(base + layout.tile)),
      bias(reinterpret_cast<float*>(base + layout.bias)),
      library_scratch(base + layout.library_scratch),
      widened_rows(reinterpret_cast<float*>(base + layout.widened_rows)),
      widened_columns(reinterpret_cast<float*>(base + layout.widened_columns)),
      decoded_rows(reinterpret_cast<BF16*>(base + layout.decoded_rows)),
      decoded_weights(reinterpret_cast<BF16*>(base + layout.decoded_weights)),
      codes(base + layout.codes) {}

MatmulKind matmul_kind() {
  static const MatmulKind kind = choose_kind();
  return kind;
}

std::string describe_matmul() {
  const dnnl_version_t* version = dnnl_version();
  return concat("oneDNN ", version->major, '.', version->minor, '.', version->patch, ", ",
                matmul_kind() == MatmulKind::kBF16 ? "BF16" : "FP32", " operands (",
                instruction_set(), ")");
}

void multiply(const MatrixView& rows, const MatrixView& weights, std::int64_t depth, float* tile,
              const Workspace& workspace) {
  with_library(rows.num_rows, weights.num_rows, depth, [&] {
    if (matmul_kind() == MatmulKind::kBF16) {
      multiply_bf16(rows, weights, depth, tile, workspace);
    } else {
      multiply_f32(rows, weights, depth, tile, workspace);
    }
  });
}

void multiply_operands(const StridedOperand& a, const StridedOperand& b, float* out,
                       std::int64_t out_stride, bool accumulates, const Workspace& workspace) {
  const auto type =
      matmul_kind() == MatmulKind::kBF16 ? memory::data_type::bf16 : memory::data_type::f32;
  with_library(a.num_outer, b.num_outer, a.depth,
               [&] { run_product(type, a, b, out, out_stride, accumulates, workspace); });
}

void multiply_packed(const BF16* a, std::int64_t num_rows, std::int64_t a_stride,
                     const DepthRows& b, float* out, const Workspace& workspace) {
  auto* copy = reinterpret_cast<BF16*>(workspace.widened_rows);
  ProductShape shape{.type = memory::data_type::bf16,
                     .a_rows = num_rows,
                     .b_rows = b.num_columns,
                     .depth = b.depth(),
                     .a_stride = a_stride,
                     .out_stride = b.num_columns,
                     .b_is_packed = true};
  with_library(num_rows, b.num_columns, b.depth(), [&] {
    const std::int64_t block = product_of(shape).block_columns();
    if (block > 0 && ceil_div(b.num_columns, block) * block <= kCpuPackedColumns) {
      pack_columns(b, block, copy);
    } else {
      // Without gaps: for rows with some the library may take another product.
      for (std::int64_t k = 0; k < b.depth(); ++k) {
        std::copy_n(b.row(k), b.num_columns, copy + k * b.num_columns);
      }
      shape.b_is_packed = false;
      shape.b_is_by_depth = true;
      shape.b_stride = b.num_columns;
    }
    product_of(shape).run(a, copy, out, workspace.library_scratch);
  });
}

}  // namespace distmoe::cpu
