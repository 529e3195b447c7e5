// SPDX-License-Identifier: Apache-2.0
//
// Token rows in and result rows out of a tile of few rows.
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/shared_copy.cuh"
#include "backend/cuda/tile/few_rows_storage.hpp"
#include "backend/cuda/tile/tile_epilogue.cuh"

namespace distmoe::cuda {

/// Named barriers of the kernel of few rows beside those of its warpgroups' epilogues.
enum class FewRowsBarrier : int { kGather = static_cast<int>(NamedBarrier::kTailLead) + 1 };

/// Copies the token rows of one stage after the other with 16-byte asynchronous copies, into the
/// 128-byte swizzle that TMA would write. Eight threads share a row.
class FewRowsGather {
 public:
  /// `thread` counts the gathering threads from 0.
  __device__ explicit FewRowsGather(int thread)
      : chunk_(thread % kChunksPerRow), first_row_(thread / kChunksPerRow) {
    // NOTE: rows of equal parity of i lie in equal swizzle phases.
    static_assert(kRowStep % 4 == 0);
    for (int i = 0; i < 2; ++i) {
      const int row = first_row_ + i * kRowStep;
      offset_[i] = first_row_ * kRowBytes + (chunk_ ^ (row & 7)) * kChunkBytes;
    }
  }

  /// A tile of `num_rows` rows of k elements; row r of it lies at address_of(r).
  template <typename AddressOf>
  __device__ __forceinline__ void start_tile(int num_rows, int k, const AddressOf& address_of) {
    num_rows_ = max(0, (num_rows - first_row_ + kRowStep - 1) / kRowStep);
    k_left_ = k - chunk_ * (kChunkBytes / 2);
#pragma unroll
    for (int i = 0; i < kMaxRows; ++i) {
      if (i >= num_rows_) continue;
      source_[i] = address_of(first_row_ + i * kRowStep) + chunk_ * kChunkBytes;
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
  static constexpr int kMaxRows = (kFewTileTokens + kRowStep - 1) / kRowStep;

  int chunk_;
  int first_row_;
  int num_rows_ = 0;
  int k_left_ = 0;
  std::uint32_t offset_[2];
  std::uint64_t source_[kMaxRows];
};

/// Stores columns [column, end_column) of a tile, from pass kPass on.
template <typename Epilogue, int kN, int kPass = 0>
__device__ __forceinline__ void store_few(const GroupedGemmArgs& product, FewRowsStorage& shared,
                                          const Accumulators<kN>& acc, const TileBias& bias,
                                          int column, int end_column, const ConsumerThread& self) {
  constexpr int kFirstToken = kPass * Epilogue::kTokens;
  static_assert(kFirstToken + Epilogue::kTokens <= kFewTileTokens);
  const std::uint32_t staging = ptx::shared_address(shared.staging[self.warpgroup][kPass % 2]);
  Epilogue::template stage<kN, kPass>(product, acc, bias, staging, self);
  // Also shows the table of result rows to the warpgroup.
  sync_warpgroup(self.warpgroup);
  RowStore<Epilogue> rows(shared.result_row[self.warpgroup], column, end_column, self.thread);
  rows.load(staging, kFirstToken);
  rows.store();
  if constexpr (kFirstToken + Epilogue::kTokens < kN) {
    store_few<Epilogue, kN, kPass + 1>(product, shared, acc, bias, column, end_column, self);
  }
}

}  // namespace distmoe::cuda
