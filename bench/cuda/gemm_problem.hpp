// SPDX-License-Identifier: Apache-2.0
//
// Random grouped-GEMM problems on the device: weights, tokens, routing tables, poisoned outputs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.hpp"

namespace distmoe::cuda::bench {

#define DISTMOE_BENCH_CUDA(call)                                                             \
  do {                                                                                       \
    const cudaError_t status_ = (call);                                                      \
    if (status_ != cudaSuccess) {                                                            \
      std::printf("%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_)); \
      std::exit(1);                                                                          \
    }                                                                                        \
  } while (0)

/// A device allocation.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t size) : size_(size) {
    DISTMOE_BENCH_CUDA(cudaMalloc(&data_, (size > 0 ? size : 1) * sizeof(T)));
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { set(values); }
  DeviceArray(DeviceArray&& other) noexcept : data_(other.data_), size_(other.size_) {
    other.data_ = nullptr;
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* get() const { return data_; }
  std::size_t size() const { return size_; }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(data_); }
  void set(const std::vector<T>& values) {
    DISTMOE_BENCH_CUDA(
        cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> values() const {
    std::vector<T> result(size_);
    DISTMOE_BENCH_CUDA(cudaMemcpy(result.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return result;
  }
  /// All bits set: NaN in BF16 and FP32.
  void poison() { DISTMOE_BENCH_CUDA(cudaMemset(data_, 0xFF, size_ * sizeof(T))); }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

/// Sizes of a problem and the routed rows of each expert.
struct ProblemShape {
  std::string name;
  int hidden_dim = 0;        ///< D
  int intermediate_dim = 0;  ///< F
  int num_tokens = 0;        ///< rows of x that routes use
  std::vector<int> rows;     ///< of each expert
  bool is_interleaved = false;
  bool is_clamped = false;
  bool has_bias = false;
  bool has_remote_rows = false;  ///< every other row is pulled from a second buffer

  int num_experts() const { return static_cast<int>(rows.size()); }
  int num_rows() const {
    int sum = 0;
    for (int r : rows) sum += r;
    return sum;
  }
};

struct Problem {
  explicit Problem(const ProblemShape& shape);

  /// Both products on `stream`: the frame's counters are reset first.
  void reset_counters(cudaStream_t stream);
  void run_w13(cudaStream_t stream);
  void run_w2(cudaStream_t stream);

  ProblemShape shape;
  int num_result_rows;
  int num_gather_rows = 0;
  int num_blocks;
  DeviceArray<__nv_bfloat16> x, peer_x, gather, w13, w2, h2, result;
  DeviceArray<float> bias13, bias2;
  DeviceArray<std::uint64_t> token_address, result_address, source_address;
  DeviceArray<std::int32_t> gather_index;
  DeviceArray<std::uint32_t> ready;
  DeviceArray<std::int32_t> row_expert;
  DeviceArray<TileGroup> groups;
  DeviceArray<CallFrame> frame;
  CallFrame initial_frame{};
  std::vector<std::int32_t> result_slot;  ///< [R]
  GroupedGemmArgs w13_args, w2_args;
  CUtensorMap w13_map{}, w2_map{};
};

}  // namespace distmoe::cuda::bench
