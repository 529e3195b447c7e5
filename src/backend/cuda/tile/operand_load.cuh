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
#include "backend/cuda/tile/row_copies.cuh"
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

using TokenGather = RowCopies<kMaxTokensPerTile>;

/// Begins with a tile's rows once they are there.
__device__ inline void start_gather(TokenGather& gather, const GroupedGemmArgs& args,
                                    const TileWork& work) {
  gather.start_tile(work.row_begin, work.num_rows, args.k);
  if (work.needs_gather != 0 && args.pull.gather_index != nullptr) {
    gather.for_each_row([&](int row) { wait_for_row(args, row); });
  }
  gather.locate_rows([&](int row) { return row_address(args.tokens, row); });
}

/// Role of the gathering warps.
template <typename Policy>
__device__ inline void run_token_gather(const GroupedGemmArgs& args, GemmStorage& shared) {
  TokenGather gather(static_cast<int>(threadIdx.x) - 32);
  WorkReader<> reader;
  StagePosition stage;
  const int num_stages = num_stages_of<Policy>(args);
  for (TileWork work = reader.next(shared); work.expert >= 0; work = reader.next(shared)) {
    start_gather(gather, args, work);
    for (int i = 0; i < num_stages; ++i, stage.advance()) {
      if constexpr (Policy::kSegments > 1) {
        if (i == num_stages / Policy::kSegments) gather.start_segment(args.k);
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
