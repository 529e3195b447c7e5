// SPDX-License-Identifier: Apache-2.0
//
// Rows of an operand into shared memory by 16-byte asynchronous copies, in the 128-byte swizzle
// that TMA would write.
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/shared_copy.cuh"
#include "backend/cuda/tile/gemm_storage.hpp"

namespace distmoe::cuda {

/// Copies the token rows of one stage after the other. Eight threads share a row; a thread's rows
/// are kRowStep apart.
template <int kTileTokens>
class RowCopies {
 public:
  /// `thread` counts the gathering threads from 0.
  __device__ explicit RowCopies(int thread)
      : chunk_(thread % kChunksPerRow), first_row_(thread / kChunksPerRow) {
    static_assert(kRowStep % 4 == 0, "rows of equal parity of i lie in equal swizzle phases");
    for (int i = 0; i < 2; ++i) {
      const int row = first_row_ + i * kRowStep;
      offset_[i] = first_row_ * kRowBytes + (chunk_ ^ (row & 7)) * kChunkBytes;
    }
  }

  /// Begins with rows [row_begin, row_begin + num_rows) of k elements each.
  __device__ __forceinline__ void start_tile(int row_begin, int num_rows, int k) {
    first_of_tile_ = row_begin + first_row_;
    num_rows_ = max(0, (num_rows - first_row_ + kRowStep - 1) / kRowStep);
    k_left_ = k - chunk_ * (kChunkBytes / 2);
  }

  /// Calls `visit` with each row of this thread.
  template <typename Visit>
  __device__ __forceinline__ void for_each_row(const Visit& visit) const {
#pragma unroll 1
    for (int i = 0; i < num_rows_; ++i) visit(first_of_tile_ + i * kRowStep);
  }

  /// A row lies at address_of(row).
  template <typename AddressOf>
  __device__ __forceinline__ void locate_rows(const AddressOf& address_of) {
#pragma unroll
    for (int i = 0; i < kMaxRows; ++i) {
      if (i >= num_rows_) continue;
      source_[i] = address_of(first_of_tile_ + i * kRowStep) + chunk_ * kChunkBytes;
    }
  }

  /// Goes on with the rows' next k elements, from where a stage began before them.
  __device__ __forceinline__ void start_segment(int k) {
    const int walked = (k + kStageK - 1) / kStageK * kRowBytes;
    k_left_ = k - chunk_ * (kChunkBytes / 2);
#pragma unroll
    for (int i = 0; i < kMaxRows; ++i) {
      if (i < num_rows_) source_[i] += k * 2 - walked;
    }
  }

  /// Rows beyond the tile's are left as they are: they only reach columns that are not stored.
  __device__ __forceinline__ void copy_stage(std::uint32_t stage_address) {
    const std::uint32_t bytes = k_left_ > 0 ? kChunkBytes : 0;
#pragma unroll
    for (int i = 0; i < kMaxRows; ++i) {
      if (i >= num_rows_) continue;
      ptx::cp_async_16(stage_address + offset_[i % 2] + i * kRowStep * kRowBytes, source_[i],
                       bytes);
      source_[i] += kRowBytes;
    }
    k_left_ -= kStageK;
  }

 private:
  static constexpr int kChunkBytes = 16;
  static constexpr int kChunksPerRow = kRowBytes / kChunkBytes;
  static constexpr int kRowStep = kGatherThreads / kChunksPerRow;
  static constexpr int kMaxRows = (kTileTokens + kRowStep - 1) / kRowStep;

  int chunk_;
  int first_row_;
  int first_of_tile_ = 0;
  int num_rows_ = 0;
  int k_left_ = 0;
  std::uint32_t offset_[2];
  std::uint64_t source_[kMaxRows];
};

}  // namespace distmoe::cuda
