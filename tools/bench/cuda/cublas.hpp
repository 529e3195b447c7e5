// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace distmoe::tools {

/// Batched BF16 products, out[b][n, m] = tokens[b][n, k] x weights[b][m, k]^T for every batch b,
/// all without gaps.
struct BatchedProduct {
  int m = 0;
  int n = 0;
  int k = 0;
  int batches = 1;
};

/// cuBLAS as the dynamic loader finds it: another folder goes into LD_LIBRARY_PATH. Belongs to the
/// device that is current when it is made.
class Cublas {
 public:
  Cublas();
  ~Cublas();
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  /// Why it cannot be used; empty where it can.
  const std::string& problem() const { return problem_; }
  /// Enqueues the products on `stream`, a cudaStream_t. Throws internal where the library refuses.
  void run(const BatchedProduct& product, const void* weights, const void* tokens, void* out,
           void* stream) const;

 private:
  using Create = int (*)(void**);
  using Destroy = int (*)(void*);
  using SetStream = int (*)(void*, void*);
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int,
                       std::int64_t, const void*, int, int, std::int64_t, const void*, void*, int,
                       int, std::int64_t, int, int, int);
  std::string problem_;
  void* handle_ = nullptr;
  Destroy destroy_ = nullptr;
  SetStream set_stream_ = nullptr;
  Gemm gemm_ = nullptr;
};

}  // namespace distmoe::tools
