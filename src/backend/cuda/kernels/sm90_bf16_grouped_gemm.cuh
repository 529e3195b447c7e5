// SPDX-License-Identifier: Apache-2.0
//
// Grouped BF16 GEMM with FP32 accumulation for the experts of one rank.
//
//   W13   acc = W13[e] x[r]       h2[r, f]     = bf16(swiglu(bf16(gate + bias), bf16(up + bias)))
//   W2    acc = W2[e] h2[r]       result[r, d] = bf16(acc + bias2)
// The products of training, with weights transposed, are in sm90_bf16_grad_gemm.cuh.
//
// m, n, k: m = rows of a weight matrix (2F or D), n = routed rows of an expert, k = D or F.
//
//   tensor    shape           where
//   weights   [L, m, k]       tensor map; W13 as [L, f / 8, half, 8, k]: a fragment's rows r and
//                             r + 8 are gate and up of the same f, so that SwiGLU stays in a thread
//   tokens    R rows of k     through addresses (or base + stride)
//   result    R rows          through addresses (or base + stride); peers' memory too
//
// A tile is 256 weight rows x up to 152 token rows, a multiple of eight; a cluster
// of two blocks computes two neighbouring token tiles and shares the weights: each block loads half
// of them for both. Roles of a block of 384 threads:
//   warp 0        weights by TMA; in the leading block also draws tiles for the cluster
//   warps 1-3     token rows by cp.async
//   warps 4-11    two consumer warpgroups, 128 weight rows each: wgmma, epilogue, stores
// Barriers: full[stage]  97 arrivals (96 gathering threads, 1 for the bytes of all weights)
//           empty[stage] 16 arrivals (consumer warps of both blocks)
//           work_full, work_empty: the scheduler's ring, tile/tile_scheduler.cuh
//           named barriers 1, 2: one per consumer warpgroup; 3: warpgroup 0 ends its tile first
// Warpgroups release stages on their own, so that one computes while the other is in its epilogue.
//
// Limits: k % 8 == 0, output width % 8 == 0, rows and weights at multiples of 16 bytes.
#pragma once

#include <cuda.h>

#include <cuda/ptx>

#include <cstdint>

#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.hpp"
#include "backend/cuda/ptx/grid_dependency.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/cuda/tile/operand_load.cuh"
#include "backend/cuda/tile/row_pull.cuh"
#include "backend/cuda/tile/stage_consumer.cuh"
#include "backend/cuda/tile/tile_epilogue.cuh"

namespace distmoe::cuda {

template <int kDims>
struct TensorCoordinates {
  std::int32_t values[kDims];
};

/// Weights [m, k] with k contiguous, summed over in one piece.
struct WeightRows {
  static constexpr bool kTransposesWeights = false;
  static constexpr int kSegments = 1;
};

template <bool kIsClamped>
struct W13Policy : WeightRows {
  using Epilogue = SwigluEpilogue<kIsClamped>;
  static constexpr Product kProduct = Product::kW13;
  static constexpr bool kPulls = true;
  static constexpr bool kLoadsWeightsEarly = false;  ///< which ones, the kernels before it say
  static constexpr int kColumnsPerWeightRow = 2;     ///< weight rows per output column

  static __device__ TensorCoordinates<5> weight_coordinates(int expert, int row,
                                                            const WeightStep& step) {
    return {{step.k, 0, 0, row / 16, expert}};
  }
};

struct W2Policy : WeightRows {
  using Epilogue = RowEpilogue;
  static constexpr Product kProduct = Product::kW2;
  static constexpr bool kPulls = false;
  /// While W13 still runs: routing was done before W13 began.
  static constexpr bool kLoadsWeightsEarly = true;
  static constexpr int kColumnsPerWeightRow = 1;

  static __device__ TensorCoordinates<3> weight_coordinates(int expert, int row,
                                                            const WeightStep& step) {
    return {{step.k, row, expert}};
  }
};

/// acc += weights x tokens^T over all of k.
template <typename Policy, int kN>
__device__ __forceinline__ void accumulate(GemmStorage& shared, StageConsumer<GemmStorage>& stages,
                                           int num_stages, int warpgroup,
                                           const GemmWarpgroupOrder& order, Accumulators<kN>& acc) {
  constexpr int kTransposed = Policy::kTransposesWeights ? 1 : 0;
  constexpr std::uint64_t kStepK = kInstructionK * 2 >> 4;
  constexpr std::uint64_t kWeightStepK = kTransposed != 0 ? kInstructionK * kRowBytes >> 4 : kStepK;
  // 64 weight rows of a stage take as many bytes either way.
  constexpr std::uint64_t kStepM = 64 * kRowBytes >> 4;
  const std::uint64_t weights = ptx::swizzled_descriptor(
      ptx::shared_address(shared.weights) + warpgroup * kWeightRowsPerWarpgroup * kRowBytes);
  const std::uint64_t tokens = ptx::swizzled_descriptor(ptx::shared_address(shared.tokens));
  int previous = -1;
  for (int stage = 0; stage < num_stages; ++stage) {
    order.at(stage);
    const int slot = stages.acquire();
    // cp.async wrote the tokens as ordinary memory accesses; wgmma reads through the async proxy.
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
    const std::uint64_t a = weights + slot * (kWeightStageBytes >> 4);
    const std::uint64_t b = tokens + slot * (kTokenStageBytes >> 4);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStageK / kInstructionK; ++k) {
      ptx::Wgmma<kN>::template run<kTransposed>(acc[0], a + k * kWeightStepK, b + k * kStepK);
      ptx::Wgmma<kN>::template run<kTransposed>(acc[1], a + k * kWeightStepK + kStepM,
                                                b + k * kStepK);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (previous >= 0) stages.release(previous);
    previous = slot;
    stages.advance();
  }
  order.at(num_stages);
  ptx::wgmma_wait<0>();
  stages.release(previous);
}

/// Where the rows of this block's tile go. Looked up before the product, so that the answer is
/// there after it.
class ResultRows {
 public:
  __device__ __forceinline__ ResultRows(const GroupedGemmArgs& args, const TileWork& work,
                                        int thread) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int row = thread + i * kWarpgroupThreads;
      address_[i] = row < work.num_rows ? row_address(args.result, work.row_begin + row) : 0;
    }
  }

  /// Shows them to the warpgroup; its next barrier makes them visible.
  __device__ __forceinline__ void share(GemmStorage& shared, const ConsumerThread& self) const {
    sync_warpgroup(self.warpgroup);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int row = self.thread + i * kWarpgroupThreads;
      if (row < kResultRows) shared.result_row[self.warpgroup][row] = address_[i];
    }
  }

 private:
  static constexpr int kPerThread = (kResultRows + kWarpgroupThreads - 1) / kWarpgroupThreads;
  std::uint64_t address_[kPerThread];
};

template <typename Policy, int kN>
__device__ __forceinline__ void compute_tile(const GroupedGemmArgs& args, GemmStorage& shared,
                                             StageConsumer<GemmStorage>& stages,
                                             const TileWork& work, int num_stages,
                                             const ConsumerThread& self) {
  using Epilogue = typename Policy::Epilogue;
  const int column =
      work.weight_row / Policy::kColumnsPerWeightRow + self.warpgroup * Epilogue::kColumns;
  const TileBias bias = Epilogue::load_bias(args, work.expert, column, self);
  const ResultRows result_rows(args, work, self.thread);
  // NOTE: cleared, although the first wgmma could overwrite: left undefined, the accumulators of
  // all widths would stay alive from tile to tile and spill.
  Accumulators<kN> acc;
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
  accumulate<Policy, kN>(shared, stages, num_stages, self.warpgroup,
                         GemmWarpgroupOrder(num_stages, self.warpgroup), acc);
  result_rows.share(shared, self);
  store_tile<Epilogue, kN>(args, shared, acc, bias, column, work.row_begin, self);
}

/// Calls compute_tile for the instruction width of the tile; token_tiling makes no other widths.
template <typename Policy, int kN = kMaxTokensPerTile>
__device__ __forceinline__ void dispatch_width(const GroupedGemmArgs& args, GemmStorage& shared,
                                               StageConsumer<GemmStorage>& stages,
                                               const TileWork& work, int num_stages,
                                               const ConsumerThread& self) {
  if (instruction_rows(work.num_rows) == kN) {
    compute_tile<Policy, kN>(args, shared, stages, work, num_stages, self);
  } else if constexpr (kN > 8) {
    constexpr int kNext = kN > 64 ? kN - 8 : kN > 16 ? kN - 16 : 8;
    dispatch_width<Policy, kNext>(args, shared, stages, work, num_stages, self);
  }
}

/// Role of the consumer warpgroups.
template <typename Policy>
__device__ __forceinline__ void run_consumer(const GroupedGemmArgs& args, GemmStorage& shared) {
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroupThreads;
  const ConsumerThread self = {__shfl_sync(kAllLanes, thread / kWarpgroupThreads, 0),
                               thread % kWarpgroupThreads, thread % kWarpgroupThreads / 32,
                               thread % 32};
  const int num_stages = num_stages_of<Policy>(args);
  const GemmWarpgroupOrder order(num_stages, self.warpgroup);
  StageConsumer<GemmStorage> stages(shared, self.lane);
  WorkReader<> reader;
  for (TileWork work = reader.next(shared); work.expert >= 0; work = reader.next(shared)) {
    const int weight_row = work.weight_row + self.warpgroup * kWeightRowsPerWarpgroup;
    if (work.num_rows == 0 || weight_row >= args.m) {
      skip_stages(stages, num_stages, order);
      continue;
    }
    dispatch_width<Policy>(args, shared, stages, work, num_stages, self);
  }
}

__device__ inline void init_barriers(GemmStorage& shared) {
  if (threadIdx.x != 0) return;
  for (int i = 0; i < kStages; ++i) {
    ::cuda::ptx::mbarrier_init(&shared.full[i], kFullArrivals);
    ::cuda::ptx::mbarrier_init(&shared.empty[i], kEmptyArrivals);
  }
  for (int i = 0; i < kWorkSlots; ++i) {
    ::cuda::ptx::mbarrier_init(&shared.work_full[i], 1);
    ::cuda::ptx::mbarrier_init(&shared.work_empty[i], kWorkReaders);
  }
  ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
}

template <typename Policy>
__global__ void __cluster_dims__(kClusterBlocks, 1, 1) __launch_bounds__(kGemmThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ GroupedGemmArgs args,
                        const __grid_constant__ CUtensorMap weights) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  GemmStorage& shared = *reinterpret_cast<GemmStorage*>(shared_bytes);
  const std::uint32_t cta_rank = blockIdx.x % kClusterBlocks;
  init_barriers(shared);
  ptx::cluster_sync();
  if constexpr (!Policy::kLoadsWeightsEarly) {
    ptx::wait_for_earlier_kernels();
    if (args.lets_next_start != 0) ptx::let_next_kernel_start();
  }
  // A call whose routing failed has no pairs. NOTE: `failed` may change while W13 waits for pulled
  // rows, and both blocks of a cluster must decide alike.
  if (args.frame->counts[static_cast<int>(Policy::kProduct)].num_pairs == 0 ||
      args.frame->num_rows <= args.others_rows) {
    ptx::wait_for_earlier_kernels();
    return;
  }
  if constexpr (Policy::kPulls) {
    if (static_cast<int>(blockIdx.x / kClusterBlocks) < args.pull.num_pullers) {
      pull_rows(args.pull, args.frame, shared, args.k * 2);
    }
  }
  if (threadIdx.x < kWarpgroupThreads) {
    ptx::decrease_registers<kProducerRegisters>();
    if (threadIdx.x < 32) {
      run_weight_load<Policy>(args, weights, shared, cta_rank);
    } else {
      // Everything that follows waits for the tokens.
      ptx::wait_for_earlier_kernels();
      run_token_gather<Policy>(args, shared);
    }
  } else {
    ptx::increase_registers<kConsumerRegisters>();
    run_consumer<Policy>(args, shared);
  }
  ptx::cluster_sync();
}

}  // namespace distmoe::cuda
