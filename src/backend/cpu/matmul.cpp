// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/matmul.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>

#include "backend/cpu/elementwise.hpp"
#include "core/check.hpp"
#include "core/environment.hpp"
#include "core/log.hpp"

namespace distmoe::cpu {
namespace {

using dnnl::memory;

// NOTE: every distinct number of rows makes the library generate code, and routing brings any
// number. The code of a product takes 70 to 90 KB where vector registers divide depth and columns
// and up to 180 KB where they don't (oneDNN 2.6.3, Zen 4, every number of rows to 512): at most 23
// MiB with these bounds, while the library's default of 1024 products could hold 180. Fewer would
// cost time: bench_cpu_bars has about 210 shapes and generating one takes about 0.5 ms, so that 48,
// 64 or 96 products make its T=1024 about 10 % slower.
constexpr int kCachedProducts = 256;
constexpr int kCachedProductsWithTails = 64;

const dnnl::engine& engine() {
  static const dnnl::engine instance = [] {
    dnnl::set_primitive_cache_capacity(kCachedProducts);
    return dnnl::engine(dnnl::engine::kind::cpu, 0);
  }();
  return instance;
}

/// Call before a product of this shape is described. The library keeps one list for the process.
void bound_cached_products(std::int64_t num_columns, std::int64_t depth) {
  constexpr std::int64_t kDepthBlock = 32;
  constexpr std::int64_t kColumnBlock = 16;
  static std::atomic<bool> has_tails{false};
  engine();
  if (depth % kDepthBlock == 0 && num_columns % kColumnBlock == 0) return;
  if (!has_tails.exchange(true)) dnnl::set_primitive_cache_capacity(kCachedProductsWithTails);
}

dnnl::stream& stream_of_this_thread() {
  thread_local dnnl::stream instance(engine());
  return instance;
}

dnnl::matmul::primitive_desc describe_product(const memory::desc& a, const memory::desc& b,
                                              const memory::desc& c) {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
#if DNNL_VERSION_MAJOR >= 3
  return dnnl::matmul::primitive_desc(engine(), a, b, c, attributes);
#else
  return dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), attributes, engine());
#endif
}

/// Runs with the workspace's scratchpad, or with a temporary one where the library wants more.
void execute(const dnnl::matmul::primitive_desc& product, const memory& a, const memory& b,
             const memory& c, const Workspace& workspace) {
  const memory::desc scratch_desc = product.scratchpad_desc();
  const bool fits = scratch_desc.get_size() <= static_cast<std::size_t>(kCpuLibraryScratchBytes);
  if (!fits) {
    static std::once_flag once;
    std::call_once(once, [&] {
      log(LogLevel::kWarning,
          concat("the matrix library asks for ", scratch_desc.get_size(), " bytes of scratch; the ",
                 "memory plan has ", kCpuLibraryScratchBytes, ": it is allocated at every call"));
    });
  }
  const memory scratch = fits ? memory(scratch_desc, engine(), workspace.library_scratch)
                              : memory(scratch_desc, engine());
  dnnl::stream& stream = stream_of_this_thread();
  dnnl::matmul(product).execute(stream, {{DNNL_ARG_SRC, a},
                                         {DNNL_ARG_WEIGHTS, b},
                                         {DNNL_ARG_DST, c},
                                         {DNNL_ARG_SCRATCHPAD, scratch}});
  stream.wait();
}

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

struct Operand {
  const void* data;
  std::int64_t num_rows;
  std::int64_t row_stride;
};

/// out[i * out_stride + j] = sum_k a(i, k) * b(j, k).
// NOTE: the rows of x are `a`. Swapped, the rows would fill vector registers and the library would
// pack them instead of the weights: 215 against 206 GFLOP/s at 128 rows, but 170 against 207 at 129
// and 69 against 137 at 24, and routing brings any number (oneDNN 2.6.3, Zen 4, one core, 512
// columns, depth 2048).
void multiply_transposed(memory::data_type type, const Operand& a, const Operand& b,
                         std::int64_t depth, float* out, std::int64_t out_stride,
                         const Workspace& workspace) {
  bound_cached_products(b.num_rows, depth);
  const memory::desc a_desc({a.num_rows, depth}, type, {a.row_stride, 1});
  const memory::desc b_desc({depth, b.num_rows}, type, {1, b.row_stride});
  const memory::desc out_desc({a.num_rows, b.num_rows}, memory::data_type::f32, {out_stride, 1});
  const auto view = [](const memory::desc& desc, const void* data) {
    return memory(desc, engine(), const_cast<void*>(data));
  };
  execute(describe_product(a_desc, b_desc, out_desc), view(a_desc, a.data), view(b_desc, b.data),
          view(out_desc, out), workspace);
}

void multiply_bf16(const MatrixView& rows, const MatrixView& weights, std::int64_t depth,
                   float* tile, const Workspace& workspace) {
  const Operand x{rows.data, rows.num_rows, rows.row_stride};
  const Operand w{weights.data, weights.num_rows, weights.row_stride};
  multiply_transposed(memory::data_type::bf16, x, w, depth, tile, weights.num_rows, workspace);
}

Operand widen_rows(const MatrixView& matrix, std::int64_t first, std::int64_t count,
                   std::int64_t depth, float* out) {
  for (std::int64_t row = 0; row < count; ++row) {
    widen(matrix.data + (first + row) * matrix.row_stride, out + row * depth, depth);
  }
  return {out, count, depth};
}

/// The same in FP32: blocks of kCpuWidenedColumns weights times blocks of kCpuWidenedRows rows.
void multiply_f32(const MatrixView& rows, const MatrixView& weights, std::int64_t depth,
                  float* tile, const Workspace& workspace) {
  for (std::int64_t m = 0; m < rows.num_rows; m += kCpuWidenedRows) {
    const std::int64_t num_m = std::min(kCpuWidenedRows, rows.num_rows - m);
    const Operand x = widen_rows(rows, m, num_m, depth, workspace.widened_rows);
    for (std::int64_t n = 0; n < weights.num_rows; n += kCpuWidenedColumns) {
      const std::int64_t num_n = std::min(kCpuWidenedColumns, weights.num_rows - n);
      const Operand w = widen_rows(weights, n, num_n, depth, workspace.widened_columns);
      multiply_transposed(memory::data_type::f32, x, w, depth, tile + m * weights.num_rows + n,
                          weights.num_rows, workspace);
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
      widened_columns(reinterpret_cast<float*>(base + layout.widened_columns)) {}

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
  const SingleThreaded single_threaded;
  try {
    if (matmul_kind() == MatmulKind::kBF16) {
      multiply_bf16(rows, weights, depth, tile, workspace);
    } else {
      multiply_f32(rows, weights, depth, tile, workspace);
    }
  } catch (const dnnl::error& error) {
    const bool out_of_memory = error.status == dnnl_out_of_memory;
    throw_error(out_of_memory ? ErrorCode::kOutOfMemory : ErrorCode::kInternal,
                concat("the matrix library failed on a product of ", rows.num_rows, " x ",
                       weights.num_rows, " x ", depth, ": ", error.what()));
  }
}

}  // namespace distmoe::cpu
