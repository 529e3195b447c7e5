// SPDX-License-Identifier: Apache-2.0
//
// The combine of a call of few rows: whoever stores the last result of a token in the columns of a
// tile adds them up there, in the order of k, whoever that is. The product and the sum each round
// once, as combine.cu's do.
#pragma once

#include <cstdint>

#include "backend/cuda/kernels/sm90_bf16_few_rows.hpp"
#include "backend/cuda/kernels/weighted_row.cuh"
#include "backend/cuda/ptx/flag.cuh"
#include "backend/cuda/tile/few_rows_schedule.cuh"
#include "backend/cuda/tile/tile_epilogue.cuh"

namespace distmoe::cuda {

inline constexpr int kConsumerThreads = kConsumerWarpgroups * kWarpgroupThreads;
inline constexpr int kCombineColumns = 8;  ///< of a thread
inline constexpr std::uint32_t kPairOfNaNs = 0x7FFF7FFFu;

__device__ __forceinline__ uint4* y_vector(const FewRowsArgs& args, int token, int column) {
  return reinterpret_cast<uint4*>(args.y + token * args.y_stride_bytes + std::int64_t{column} * 2);
}

/// y of kCombineColumns columns of a token.
__device__ __forceinline__ void combine_columns(const FewRowsArgs& args,
                                                const FewRowsTables& tables, int token,
                                                int column) {
  constexpr int kInFlight = 8;
  const std::uint16_t* rows = &tables.row_of_route[token * args.top_k];
  const float* scores = &tables.scores[token * args.top_k];
  float sums[kCombineColumns] = {};
  for (int begin = 0; begin < args.top_k; begin += kInFlight) {
    uint4 results[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (begin + i >= args.top_k || rows[begin + i] == FewRowsTables::kNoRow) continue;
      const std::uint64_t row = args.w2.result.base + rows[begin + i] * args.w2.result.stride_bytes;
      results[i] = __ldcg(reinterpret_cast<const uint4*>(row + std::int64_t{column} * 2));
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (begin + i >= args.top_k || rows[begin + i] == FewRowsTables::kNoRow) continue;
      add_scaled(unpack(results[i]), scores[begin + i], sums);
    }
  }
  const PackedColumns<kCombineColumns> y = round_columns(sums);
  *y_vector(args, token, column) = {y.words[0], y.words[1], y.words[2], y.words[3]};
}

/// After a warpgroup has stored a tile of W2: counts its rows in and combines the tokens that are
/// complete with them, in columns [column, end_column). By the whole warpgroup.
__device__ __forceinline__ void combine_complete(const FewRowsArgs& args, FewRowsStorage& shared,
                                                 const FewRowsTile& work, int column,
                                                 int end_column, const ConsumerThread& self) {
  const FewRowsTables& tables = shared.tables;
  std::int16_t* complete = shared.complete_token[self.warpgroup];
  sync_warpgroup(self.warpgroup);  // the tile's rows are stored
  if (self.thread < work.num_rows) {
    const int token = tables.route_of_row[work.row_begin + self.thread] / args.top_k;
    std::uint32_t* arrived = &args.arrivals[work.weight_tile * args.num_tokens + token];
    const std::uint32_t before = ptx::add_acquire_release_gpu(arrived, 1);
    const bool is_last = before + 1 == tables.routes_of_token[token];
    if (is_last) *arrived = 0;  // for the next call
    complete[self.thread] = static_cast<std::int16_t>(is_last ? token : -1);
  }
  sync_warpgroup(self.warpgroup);
  constexpr int kThreadsPerToken = kFewTileWeights / kCombineColumns;
  const int my_column = column + self.thread % kThreadsPerToken * kCombineColumns;
  for (int row = self.thread / kThreadsPerToken; row < work.num_rows;
       row += kWarpgroupThreads / kThreadsPerToken) {
    if (complete[row] < 0 || my_column >= end_column) continue;
    combine_columns(args, tables, complete[row], my_column);
  }
}

/// y of the tokens that no tile completes: NaN in a failed call, else 0 where a token has no
/// routes. By the consumer threads of all blocks.
__device__ inline void fill_incomplete(const FewRowsArgs& args, const FewRowsTables& tables,
                                       bool failed, int thread) {
  const std::uint32_t word = failed ? kPairOfNaNs : 0;
  for (int token = static_cast<int>(blockIdx.x); token < args.num_tokens;
       token += static_cast<int>(gridDim.x)) {
    if (!failed && tables.routes_of_token[token] != 0) continue;
    for (int column = thread * kCombineColumns; column < args.w2.m;
         column += kConsumerThreads * kCombineColumns) {
      *y_vector(args, token, column) = {word, word, word, word};
    }
  }
}

/// All routes of the only token in the columns of a tile: row r * w2_rows + c of the weights is
/// column c of the expert of row r of h2, and counts for that row alone.
class OneTokenTile {
 public:
  /// Looks up before the product what is needed after it.
  __device__ __forceinline__ OneTokenTile(const FewRowsArgs& args, const FewRowsTables& tables,
                                          const FewRowsTile& work, const ConsumerThread& self)
      : columns_(args.tiles.w2_rows), thread_(self.thread) {
    const int first_column = work.weight_tile * columns_;
    column_ = first_column + self.thread;
    is_stored_ = self.thread < columns_ && column_ < args.w2.m;
#pragma unroll
    for (int k = 0; k < kOneTokenRoutes; ++k) {
      const int row = k < args.top_k ? tables.row_of_route[k] : FewRowsTables::kNoRow;
      row_[k] = row == FewRowsTables::kNoRow ? -1 : row;
      score_[k] = k < args.top_k ? tables.scores[k] : 0.0f;
    }
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      const int m = weight_row(f, self);
      const int row = m / columns_;
      // Of the four threads that hold sums of this weight row, one holds that of the row.
      parity_[f] = row < tables.num_rows && row / 2 == self.lane % 4 ? row % 2 : -1;
      bias_[f] = parity_[f] < 0 ? 0.0f
                                : bias_at(args.w2.bias, tables.expert_of_row[row],
                                          first_column + m - row * columns_, args.w2.m);
    }
  }

  /// Shows what stands for rows of h3, rounded like them, then adds them up in the order of k.
  __device__ __forceinline__ void combine(const FewRowsArgs& args, float* results,
                                          const Accumulators<kOneTokenRoutes>& acc,
                                          const ConsumerThread& self) const {
    sync_warpgroup(self.warpgroup);  // all have read the results of the tile before
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      const float* sums = &acc[f / 2][f % 2 * 2];
      const float sum = (parity_[f] == 0 ? sums[0] : sums[1]) + bias_[f];
      if (parity_[f] >= 0) results[weight_row(f, self)] = low_bf16(pack_bf16(sum, 0.0f));
    }
    sync_warpgroup(self.warpgroup);
    if (!is_stored_) return;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kOneTokenRoutes; ++k) {
      const float result = row_[k] < 0 ? 0.0f : results[row_[k] * columns_ + thread_];
      if (row_[k] >= 0) sum = __fadd_rn(sum, __fmul_rn(result, score_[k]));
    }
    reinterpret_cast<__nv_bfloat16*>(args.y)[column_] = __float2bfloat16_rn(sum);
  }

 private:
  /// Of a thread: two accumulators, two weight rows of each.
  static constexpr int kFragments = 4;
  static __device__ __forceinline__ int weight_row(int fragment, const ConsumerThread& self) {
    return 64 * (fragment / 2) + 16 * self.warp + 8 * (fragment % 2) + self.lane / 4;
  }

  int columns_;
  int thread_;
  int column_;
  bool is_stored_;
  int row_[kOneTokenRoutes];
  float score_[kOneTokenRoutes];
  int parity_[kFragments];
  float bias_[kFragments];
};

}  // namespace distmoe::cuda
