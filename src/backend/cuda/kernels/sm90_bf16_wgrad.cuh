// SPDX-License-Identifier: Apache-2.0
//
// Gradients of the expert weights: BF16 operands, FP32 accumulation over an expert's rows.
//
//   out[e, m, n] (+)= sum_{r of e} grads[r, m] activations[r, n]
//
//   weight   grads      m    activations   n
//   W13      grad_h1    2F   x gathered    D
//   W2       grad_h3    D    h2            F
//
// Rows are the k of this product and contiguous in neither operand: both lie transposed in shared
// memory (32 rows x 64 columns a box, as TMA writes them) and wgmma reads them so. Nothing is
// transposed in memory.
//
// A tile is 256 m x 128 n of one expert; a cluster of two blocks computes neighbouring n and shares
// grads: each block loads half of them for both. Tiles are dealt to clusters in turn, expert by
// expert, so that clusters that run together read the same rows. Roles of a block of 384 threads:
//   warp 0        both operands by TMA
//   warps 4-11    two consumer warpgroups, 128 m each: wgmma, stores
// Barriers: full[stage]  1 arrival, for the bytes of both operands
//           empty[stage] 16 arrivals (consumer warps of both blocks)
//           added[warp]  an arrival for each box that its tile is added to, and for its bytes
//           named barriers 1, 2: one per consumer warpgroup; 3: warpgroup 0 ends its tile first
//
// Rows beyond an expert's last are another expert's: those that share the last instruction of 16
// with it are cleared in shared memory, in both operands (a NaN there must not come in), and the
// instructions after it are left out.
//
// A gradient leaves through shared memory, box by box, by bulk stores of whole lines of memory.
// What it is added to is loaded into the same boxes while the products run; FP32, whose tile is
// larger than they are, is added in L2 in its second half, by the stores themselves. A gradient
// whose halves interleave at no multiple of 16 rows leaves from registers: lanes of a quad exchange
// columns until each has 16 bytes of a row, eight rows of 64 bytes a warp.
//
// Limits: n % 8 == 0; offsets multiples of 128 bytes, rows of 16.
#pragma once

#include <cuda_bf16.h>

#include <cuda/ptx>

#include <cstdint>

#include "backend/cuda/kernels/sm90_bf16_wgrad.hpp"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/ptx/shared_copy.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/cuda/tile/stage_consumer.cuh"
#include "backend/cuda/tile/wgrad_boxes.cuh"
#include "backend/cuda/tile/wgrad_storage.hpp"
#include "backend/cuda/tile/wgrad_store.cuh"

namespace distmoe::cuda {

/// One tile of one expert.
struct WgradTile {
  std::int32_t expert;
  std::int32_t m;          ///< first of the block
  std::int32_t n;          ///< first of the block
  std::int32_t row_begin;  ///< rows of the expert; none of a failed call
  std::int32_t num_rows;

  __device__ int num_stages() const { return (num_rows + kWgradStageRows - 1) / kWgradStageRows; }
};

/// The tiles of this block's cluster, one after the other; every role walks them alike.
class WgradTiles {
 public:
  __device__ WgradTiles(const WgradArgs& args, bool is_failed)
      : args_(args),
        m_tiles_((args.m + kWgradM - 1) / kWgradM),
        n_pairs_((args.n + kClusterBlocks * kWgradN - 1) / (kClusterBlocks * kWgradN)),
        next_(static_cast<int>(blockIdx.x) / kClusterBlocks),
        is_failed_(is_failed) {}

  /// False where none is left. Tiles that change nothing are left out.
  __device__ bool next(WgradTile& tile) {
    const int per_expert = m_tiles_ * n_pairs_;
    while (next_ < args_.num_experts * per_expert) {
      const int expert = next_ / per_expert;
      const int in_expert = next_ - expert * per_expert;
      const int m_tile = in_expert / n_pairs_;
      next_ += static_cast<int>(gridDim.x) / kClusterBlocks;
      tile.expert = expert;
      tile.m = m_tile * kWgradM;
      tile.n = ((in_expert - m_tile * n_pairs_) * kClusterBlocks +
                static_cast<int>(blockIdx.x) % kClusterBlocks) *
               kWgradN;
      tile.row_begin = is_failed_ ? 0 : args_.expert_begin[expert];
      tile.num_rows = is_failed_ ? 0 : args_.expert_begin[expert + 1] - tile.row_begin;
      if (tile.num_rows > 0 || args_.out.accumulates == 0) return true;
    }
    return false;
  }

 private:
  const WgradArgs& args_;
  int m_tiles_;
  int n_pairs_;
  int next_;
  bool is_failed_;
};

/// Role of the loading thread.
template <typename Storage>
__device__ inline void run_wgrad_load(const WgradArgs& args, const WgradMaps& maps, Storage& shared,
                                      WgradTiles tiles) {
  constexpr std::uint16_t kBothBlocks = (1 << kClusterBlocks) - 1;
  constexpr std::uint64_t kUnit = kRowBytes;
  const int half = static_cast<int>(blockIdx.x % kClusterBlocks);
  const auto first_unit = [&](const std::uint64_t* operand) {
    return static_cast<std::int32_t>((*operand - args.buffer) / kUnit);
  };
  const std::int32_t a_begin = first_unit(args.grads);
  const std::int32_t b_begin = first_unit(args.activations);
  RingPosition<Storage::kNumStages> stage;
  WgradTile tile;
  while (tiles.next(tile)) {
    const std::int32_t a_unit = a_begin + tile.m / kWgradChunkColumns + half * kWgradChunksA;
    const std::int32_t b_unit = b_begin + tile.n / kWgradChunkColumns;
    for (int i = 0; i < tile.num_stages(); ++i, stage.advance()) {
      ptx::wait(&shared.empty[stage.slot], stage.parity ^ 1);
      ::cuda::ptx::mbarrier_arrive_expect_tx(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                             ::cuda::ptx::space_shared, &shared.full[stage.slot],
                                             kWgradStageBytesA + kWgradStageBytesB);
      const std::int32_t row = tile.row_begin + i * kWgradStageRows;
      const std::int32_t at_a[3] = {0, row, a_unit};
      const std::int32_t at_b[3] = {0, row, b_unit};
      ::cuda::ptx::cp_async_bulk_tensor(
          ::cuda::ptx::space_cluster, ::cuda::ptx::space_global,
          shared.a[stage.slot] + half * kWgradChunksA * kWgradChunkBytes, &maps.grads, at_a,
          &shared.full[stage.slot], kBothBlocks);
      ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global,
                                        shared.b[stage.slot], &maps.activations, at_b,
                                        &shared.full[stage.slot]);
    }
  }
}

/// Clears rows `begin` to `end` of this warpgroup's columns of a and of all columns of b, 128 bytes
/// of each chunk. NOTE: the other warpgroup writes the same zeros to b, at any time before it
/// releases the stage.
template <typename Storage>
__device__ inline void clear_rows(Storage& shared, int slot, int begin, int end,
                                  const ConsumerThread& self) {
  constexpr int kVectors = kRowBytes / 16;
  const int per_chunk = (end - begin) * kVectors;
  for (int i = self.thread; i < (kWgradChunksA + kWgradChunksB) * per_chunk;
       i += kWarpgroupThreads) {
    const int chunk = i / per_chunk;
    const int offset = begin * kRowBytes + (i - chunk * per_chunk) * 16;
    std::uint8_t* base =
        chunk < kWgradChunksA
            ? shared.a[slot] + (self.warpgroup * kWgradChunksA + chunk) * kWgradChunkBytes
            : shared.b[slot] + (chunk - kWgradChunksA) * kWgradChunkBytes;
    *reinterpret_cast<uint4*>(base + offset) = {0, 0, 0, 0};
  }
  // wgmma reads through the async proxy.
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  sync_warpgroup(self.warpgroup);
}

/// acc += a^T b over the rows of the tile. `meanwhile` is called in each whole stage, with products
/// on their way.
template <typename Storage, typename Order, typename Meanwhile>
__device__ __forceinline__ void accumulate_rows(Storage& shared, StageConsumer<Storage>& stages,
                                                int num_rows, const Order& order,
                                                const ConsumerThread& self,
                                                WgradAccumulators& acc,
                                                const Meanwhile& meanwhile) {
  constexpr std::uint64_t kStepK = kInstructionK * kRowBytes >> 4;
  constexpr std::uint64_t kStepM = kWgradChunkBytes >> 4;
  const std::uint64_t a_base = ptx::transposed_descriptor(
      ptx::shared_address(shared.a[0]) + self.warpgroup * kWgradChunksA * kWgradChunkBytes,
      kWgradChunkBytes);
  const std::uint64_t b_base =
      ptx::transposed_descriptor(ptx::shared_address(shared.b[0]), kWgradChunkBytes);
  const int num_whole = num_rows / kWgradStageRows;
  const int tail = num_rows - num_whole * kWgradStageRows;
  const auto multiply = [&](std::uint64_t a, std::uint64_t b) {
    ptx::Wgmma<kWgradN>::run<1, 1>(acc[0], a, b);
    ptx::Wgmma<kWgradN>::run<1, 1>(acc[1], a + kStepM, b);
  };
  int previous = -1;
  for (int stage = 0; stage < num_whole; ++stage) {
    order.at(stage);
    const int slot = stages.acquire();
    const std::uint64_t a = a_base + slot * (kWgradStageBytesA >> 4);
    const std::uint64_t b = b_base + slot * (kWgradStageBytesB >> 4);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kWgradStageRows / kInstructionK; ++k) {
      multiply(a + k * kStepK, b + k * kStepK);
    }
    ptx::wgmma_commit();
    meanwhile();
    ptx::wgmma_wait<1>();
    if (previous >= 0) stages.release(previous);
    previous = slot;
    stages.advance();
  }
  if (tail > 0) {
    order.at(num_whole);
    const int slot = stages.acquire();
    const int steps = (tail + kInstructionK - 1) / kInstructionK;
    if (tail < steps * kInstructionK) clear_rows(shared, slot, tail, steps * kInstructionK, self);
    const std::uint64_t a = a_base + slot * (kWgradStageBytesA >> 4);
    const std::uint64_t b = b_base + slot * (kWgradStageBytesB >> 4);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kWgradStageRows / kInstructionK; ++k) {
      if (k < steps) multiply(a + k * kStepK, b + k * kStepK);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (previous >= 0) stages.release(previous);
    previous = slot;
    stages.advance();
  }
  order.at(num_whole + (tail > 0 ? 1 : 0));
  ptx::wgmma_wait<0>();
  if (previous >= 0) stages.release(previous);
}

/// Role of the consumer warpgroups.
template <typename Policy>
__device__ __forceinline__ void run_wgrad_consumer(const WgradArgs& args, const WgradMaps& maps,
                                                   typename Policy::Storage& shared,
                                                   WgradTiles tiles, float initial) {
  using Storage = typename Policy::Storage;
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroupThreads;
  const ConsumerThread self = {__shfl_sync(~0u, thread / kWarpgroupThreads, 0),
                               thread % kWarpgroupThreads, thread % kWarpgroupThreads / 32,
                               thread % 32};
  StageConsumer<Storage> stages(shared, self.lane);
  std::uint32_t added_parity = 0;
  WgradTile tile;
  while (tiles.next(tile)) {
    const int num_stages = tile.num_stages();
    const WarpgroupOrder<Storage::kNumStages, Storage::kNumStages - 2> order(num_stages,
                                                                            self.warpgroup);
    const GradientPlace place = {tile.expert, tile.m + self.warpgroup * kWgradWarpgroupM, tile.n};
    if (!is_inside(args, place)) {
      skip_stages(stages, num_stages, order);
      continue;
    }
    WgradAccumulators acc;
#pragma unroll
    for (int i = 0; i < kWgradN / 2; ++i) acc[0][i] = acc[1][i] = initial;
    AddedBoxes<Policy> added(args, maps, place, shared, self);
    // The shuffle tells the compiler that all lanes walk the same stages: it would serialise wgmma.
    accumulate_rows(shared, stages, __shfl_sync(~0u, tile.num_rows, 0), order, self, acc,
                    [&] { added.load_next(); });
    if constexpr (Policy::kHasBoxes) {
      added.load_all();
      if constexpr (Policy::kAccumulates) {
        ptx::wait(added.barrier(), added_parity);
        added_parity ^= 1;
      }
      store_boxes<Policy>(args, maps, acc, place, shared, self);
    } else {
      store_gradient<Policy>(args, acc, place, self);
    }
  }
  if (Policy::kHasBoxes && self.lane == 0) wait_for_bulk_reads<0>();
}

template <typename Storage>
__device__ inline void init_wgrad_barriers(Storage& shared) {
  if (threadIdx.x != 0) return;
  for (int i = 0; i < Storage::kNumStages; ++i) {
    ::cuda::ptx::mbarrier_init(&shared.full[i], 1);
    ::cuda::ptx::mbarrier_init(&shared.empty[i], kClusterBlocks * kConsumerWarps);
  }
  for (std::uint64_t& added : shared.added) ::cuda::ptx::mbarrier_init(&added, Storage::kBoxes);
  ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
}

template <typename Policy>
__global__ void __cluster_dims__(kClusterBlocks, 1, 1) __launch_bounds__(kGemmThreads, 1)
    wgrad_kernel(const __grid_constant__ WgradArgs args, const __grid_constant__ WgradMaps maps) {
  extern __shared__ __align__(1024) std::uint8_t wgrad_bytes[];
  auto& shared = *reinterpret_cast<typename Policy::Storage*>(wgrad_bytes);
  init_wgrad_barriers(shared);
  ptx::cluster_sync();
  const bool is_failed = args.frame->failed != 0;
  const WgradTiles tiles(args, is_failed);
  if (threadIdx.x < kWarpgroupThreads) {
    ptx::decrease_registers<kProducerRegisters>();
    if (threadIdx.x == 0) run_wgrad_load(args, maps, shared, tiles);
  } else {
    ptx::increase_registers<kConsumerRegisters>();
    const float initial = is_failed ? __int_as_float(0x7FFFFFFF) : 0.0f;
    run_wgrad_consumer<Policy>(args, maps, shared, tiles, initial);
  }
  ptx::cluster_sync();
}

}  // namespace distmoe::cuda
