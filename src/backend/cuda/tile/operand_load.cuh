// SPDX-License-Identifier: Apache-2.0
//
// The producer roles of the grouped GEMM: weights by TMA, half a tile per block and multicast to
// both; token rows by 16-byte asynchronous copies through their addresses into the same 128-byte
// swizzle that TMA writes. Both complete on the stage's "full" barrier.
#pragma once

#include <cuda.h>

#include <cuda/ptx>

#include <cstdint>

#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.hpp"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/flag.cuh"
#include "backend/cuda/ptx/shared_copy.cuh"
#include "backend/cuda/tile/gemm_storage.hpp"
#include "backend/cuda/tile/stage_consumer.cuh"
#include "backend/cuda/tile/tile_scheduler.cuh"

namespace distmoe::cuda {

/// Arrivals at "full": each gathering thread's copies, and the thread that announces the TMA bytes.
inline constexpr int kFullArrivals = kGatherThreads + 1;
/// Arrivals at "empty": every consumer warp of both blocks, since each block's weights go to both.
inline constexpr int kEmptyArrivals = kClusterBlocks * kConsumerWarps;

/// Stages of a tile: k in whole stages, once or, with two segments, twice.
template <typename Policy>
__device__ __forceinline__ int num_stages_of(const GroupedGemmArgs& args) {
  return Policy::kSegments * ((args.k + kStageK - 1) / kStageK);
}

/// Records that a chunk of the gather buffer never came; later kernels of the call compute nothing.
__device__ inline void record_gather_timeout(CallFrame* frame, int chunk, std::uint32_t actual) {
  if (atomicExch(&frame->failed, 1) != 0) return;
  frame->fault = {FaultKind::kGatherTimeout, -1, chunk, frame->gather_epoch, actual};
}

/// Waits until the row is there: at once for a row of this rank's own tokens.
__device__ inline void wait_for_row(const GroupedGemmArgs& args, int row) {
  const int gathered = args.pull.gather_index[row];
  if (gathered < 0) return;
  const int chunk = gathered / kGatherChunkRows;
  const std::uint32_t epoch = args.frame->gather_epoch;
  std::uint64_t deadline = 0;
  while (true) {
    const std::uint32_t seen = ptx::load_acquire_gpu(&args.pull.ready[chunk]);
    if (seen == epoch) return;
    // One wait is enough: after a timeout nothing of the call counts.
    if (__ldcg(&args.frame->failed) != 0) return;
    const std::uint64_t now = ptx::global_timer_ns();
    if (deadline == 0) deadline = now + args.timeout_ns;
    if (now > deadline) return record_gather_timeout(args.frame, chunk, seen);
  }
}

/// Copies the token rows of one stage after the other. Eight threads share a row; a thread's rows
/// are kRowStep apart.
class TokenGather {
 public:
  static constexpr int kChunkBytes = 16;
  static constexpr int kChunksPerRow = kRowBytes / kChunkBytes;
  static constexpr int kRowStep = kGatherThreads / kChunksPerRow;
  static constexpr int kMaxRows = (kMaxTokensPerTile + kRowStep - 1) / kRowStep;
  static_assert(kRowStep % 4 == 0, "rows of equal parity of i lie in equal swizzle phases");

  /// `thread` counts the gathering threads from 0.
  __device__ explicit TokenGather(int thread)
      : chunk_(thread % kChunksPerRow), first_row_(thread / kChunksPerRow) {
    const int swizzled[2] = {chunk_ ^ (first_row_ & 7), chunk_ ^ ((first_row_ + kRowStep) & 7)};
    for (int i = 0; i < 2; ++i) offset_[i] = first_row_ * kRowBytes + swizzled[i] * kChunkBytes;
  }

  __device__ void start_tile(const GroupedGemmArgs& args, const TileWork& work) {
    num_rows_ = max(0, (work.num_rows - first_row_ + kRowStep - 1) / kRowStep);
    k_left_ = args.k - chunk_ * (kChunkBytes / 2);
    const int first = work.row_begin + first_row_;
    if (work.needs_gather != 0 && args.pull.gather_index != nullptr) {
#pragma unroll 1
      for (int i = 0; i < num_rows_; ++i) wait_for_row(args, first + i * kRowStep);
    }
#pragma unroll
    for (int i = 0; i < kMaxRows; ++i) {
      if (i >= num_rows_) continue;
      source_[i] = row_address(args.tokens, first + i * kRowStep) + chunk_ * kChunkBytes;
    }
  }

  /// Goes on with the row's next k elements, from where a stage began before them.
  __device__ void start_segment(const GroupedGemmArgs& args) {
    const int walked = (args.k + kStageK - 1) / kStageK * kRowBytes;
    k_left_ = args.k - chunk_ * (kChunkBytes / 2);
#pragma unroll
    for (int i = 0; i < kMaxRows; ++i) {
      if (i < num_rows_) source_[i] += args.k * 2 - walked;
    }
  }

  /// Rows beyond the tile's are left as they are: they only reach columns that are not stored.
  __device__ void copy_stage(std::uint32_t stage_address) {
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
  int chunk_;
  int first_row_;
  int num_rows_ = 0;
  int k_left_ = 0;
  std::uint32_t offset_[2];
  std::uint64_t source_[kMaxRows];
};

/// Role of the gathering warps.
template <typename Policy>
__device__ inline void run_token_gather(const GroupedGemmArgs& args, GemmStorage& shared) {
  TokenGather gather(static_cast<int>(threadIdx.x) - 32);
  WorkReader<> reader;
  StagePosition stage;
  const int num_stages = num_stages_of<Policy>(args);
  for (TileWork work = reader.next(shared); work.expert >= 0; work = reader.next(shared)) {
    gather.start_tile(args, work);
    for (int i = 0; i < num_stages; ++i, stage.advance()) {
      if constexpr (Policy::kSegments > 1) {
        if (i == num_stages / Policy::kSegments) gather.start_segment(args);
      }
      ptx::wait(&shared.empty[stage.slot], stage.parity ^ 1);
      gather.copy_stage(ptx::shared_address(shared.tokens[stage.slot]));
      ptx::cp_async_arrive(ptx::shared_address(&shared.full[stage.slot]));
    }
  }
}

/// Where a stage of weights begins: element k of a segment.
struct WeightStep {
  int segment;
  int k;
};

template <typename Policy>
__device__ __forceinline__ WeightStep weight_step(int stage, int num_stages) {
  if constexpr (Policy::kSegments == 1) return {0, stage * kStageK};
  const int per_segment = num_stages / Policy::kSegments;
  const int segment = stage / per_segment;
  return {segment, (stage - segment * per_segment) * kStageK};
}

/// Loads this block's half of a weight stage into both blocks.
template <typename Policy>
__device__ __forceinline__ void load_weights(const CUtensorMap& map, GemmStorage& shared, int slot,
                                             const TileWork& work, const WeightStep& step,
                                             std::uint32_t cta_rank) {
  constexpr std::uint16_t kBothBlocks = (1 << kClusterBlocks) - 1;
  const int half = static_cast<int>(cta_rank) * kWeightRowsPerBlock;
  ::cuda::ptx::mbarrier_arrive_expect_tx(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                         ::cuda::ptx::space_shared, &shared.full[slot],
                                         kWeightStageBytes);
  // A box of transposed weights is 64 weight rows wide.
  constexpr int kBoxRows = Policy::kTransposesWeights ? kStageK : kWeightRowsPerBlock;
#pragma unroll
  for (int i = 0; i < kWeightRowsPerBlock / kBoxRows; ++i) {
    const int row = half + i * kBoxRows;
    const auto coordinates = Policy::weight_coordinates(work.expert, work.weight_row + row, step);
    ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global,
                                      &shared.weights[slot][row * kRowBytes], &map,
                                      coordinates.values, &shared.full[slot], kBothBlocks);
  }
}

/// Role of the warp that loads weights; in the leading block it draws the tiles as well: the next
/// one while the ring is full, so that looking it up costs no time.
template <typename Policy>
__device__ void run_weight_load(const GroupedGemmArgs& args, const CUtensorMap& map,
                                GemmStorage& shared, std::uint32_t cta_rank) {
  const bool is_leader = cta_rank == 0;
  const int num_stages = num_stages_of<Policy>(args);
  const int draw_at = min(kStages - 1, num_stages - 1);
  TileSource source(args.frame, args.groups, Policy::kProduct,
                    (args.m + kWeightRows - 1) / kWeightRows, is_leader);
  WorkPublisher publisher;
  WorkReader<true> reader;
  StagePosition stage;
  if (is_leader) publisher.publish(shared, source.next());
  for (TileWork work = reader.next(shared); work.expert >= 0; work = reader.next(shared)) {
    for (int i = 0; i < num_stages; ++i, stage.advance()) {
      if (threadIdx.x == 0) {
        ptx::wait(&shared.empty[stage.slot], stage.parity ^ 1);
        load_weights<Policy>(map, shared, stage.slot, work, weight_step<Policy>(i, num_stages),
                             cta_rank);
      }
      __syncwarp();
      if (is_leader && i == draw_at) publisher.publish(shared, source.next());
    }
  }
}

}  // namespace distmoe::cuda
