// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace distmoe::cuda::bench {

/// Strided batched BF16 products of the cuBLAS that the dynamic loader finds: another folder goes
/// into LD_LIBRARY_PATH.
class CublasPeer {
 public:
  CublasPeer();
  bool is_available() const { return handle_ != nullptr; }
  /// out[b][n, m] = tokens[b][n, k] x weights[b][m, k]^T for every batch b.
  void run(const __nv_bfloat16* weights, const __nv_bfloat16* tokens, __nv_bfloat16* out, int m,
           int n, int k, int batches, cudaStream_t stream);

 private:
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int,
                       std::int64_t, const void*, int, int, std::int64_t, const void*, void*, int,
                       int, std::int64_t, int, int, int);
  using SetStream = int (*)(void*, cudaStream_t);
  void* handle_ = nullptr;
  Gemm gemm_ = nullptr;
  SetStream set_stream_ = nullptr;
};

}  // namespace distmoe::cuda::bench
