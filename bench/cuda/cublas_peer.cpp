// SPDX-License-Identifier: Apache-2.0
#include "cublas_peer.hpp"

#include <dlfcn.h>

#include <cstdio>

namespace distmoe::cuda::bench {

CublasPeer::CublasPeer() {
  void* library = dlopen("libcublas.so.13", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    std::printf("no cuBLAS: %s\n", dlerror());
    return;
  }
  using Create = int (*)(void**);
  const auto create = reinterpret_cast<Create>(dlsym(library, "cublasCreate_v2"));
  gemm_ = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmStridedBatchedEx"));
  set_stream_ = reinterpret_cast<SetStream>(dlsym(library, "cublasSetStream_v2"));
  if (create == nullptr || gemm_ == nullptr || set_stream_ == nullptr) return;
  if (const int status = create(&handle_); status != 0) {
    std::printf("cublasCreate: %d\n", status);
    handle_ = nullptr;
  }
}

void CublasPeer::run(const __nv_bfloat16* weights, const __nv_bfloat16* tokens, __nv_bfloat16* out,
                     int m, int n, int k, int batches, cudaStream_t stream) {
  constexpr int kTranspose = 1;     // CUBLAS_OP_T
  constexpr int kAsIs = 0;          // CUBLAS_OP_N
  constexpr int kBf16 = 14;         // CUDA_R_16BF
  constexpr int kCompute32F = 68;   // CUBLAS_COMPUTE_32F
  constexpr int kDefaultAlgo = -1;  // CUBLAS_GEMM_DEFAULT
  const float one = 1.0f;
  const float zero = 0.0f;
  set_stream_(handle_, stream);
  const int status = gemm_(handle_, kTranspose, kAsIs, m, n, k, &one, weights, kBf16, k,
                           static_cast<std::int64_t>(m) * k, tokens, kBf16, k,
                           static_cast<std::int64_t>(n) * k, &zero, out, kBf16, m,
                           static_cast<std::int64_t>(n) * m, batches, kCompute32F, kDefaultAlgo);
  if (status != 0) std::printf("cublasGemmStridedBatchedEx: %d\n", status);
}

}  // namespace distmoe::cuda::bench
