// SPDX-License-Identifier: Apache-2.0
#include "bench/cuda/cublas.hpp"

#include <dlfcn.h>

#include "core/check.hpp"

namespace distmoe::tools {
namespace {

constexpr const char* kLibrary = "libcublas.so.13";

template <typename Function>
Function find(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

Cublas::Cublas() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    problem_ = reason != nullptr ? reason : kLibrary;
    return;
  }
  const auto create = find<Create>(library, "cublasCreate_v2");
  destroy_ = find<Destroy>(library, "cublasDestroy_v2");
  set_stream_ = find<SetStream>(library, "cublasSetStream_v2");
  gemm_ = find<Gemm>(library, "cublasGemmStridedBatchedEx");
  if (create == nullptr || destroy_ == nullptr || set_stream_ == nullptr || gemm_ == nullptr) {
    problem_ = concat(kLibrary, " lacks a function that is needed");
  } else if (const int status = create(&handle_); status != 0) {
    handle_ = nullptr;
    problem_ = concat("cublasCreate gives status ", status);
  }
}

Cublas::~Cublas() {
  if (handle_ != nullptr) destroy_(handle_);
}

void Cublas::run(const BatchedProduct& product, const void* weights, const void* tokens, void* out,
                 void* stream) const {
  constexpr int kTranspose = 1;     // CUBLAS_OP_T
  constexpr int kAsIs = 0;          // CUBLAS_OP_N
  constexpr int kBf16 = 14;         // CUDA_R_16BF
  constexpr int kCompute32F = 68;   // CUBLAS_COMPUTE_32F
  constexpr int kDefaultAlgo = -1;  // CUBLAS_GEMM_DEFAULT
  const float one = 1.0f;
  const float zero = 0.0f;
  const auto [m, n, k, batches] = product;
  const auto elements = [](int rows, int columns) { return std::int64_t{rows} * columns; };
  set_stream_(handle_, stream);
  const int status = gemm_(handle_, kTranspose, kAsIs, m, n, k, &one, weights, kBf16, k,
                           elements(m, k), tokens, kBf16, k, elements(n, k), &zero, out, kBf16, m,
                           elements(n, m), batches, kCompute32F, kDefaultAlgo);
  DISTMOE_CHECK(status == 0, kInternal, "cublasGemmStridedBatchedEx gives status ", status);
}

}  // namespace distmoe::tools
