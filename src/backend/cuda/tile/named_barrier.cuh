// SPDX-License-Identifier: Apache-2.0
//
// The named barriers of a GEMM's block and a consumer thread's place in it.
#pragma once

#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/tile/gemm_storage.hpp"

namespace distmoe::cuda {

/// A thread's place in its warpgroup and the warpgroup's in the block.
struct ConsumerThread {
  int warpgroup;  ///< 0 or 1
  int thread;     ///< in the warpgroup
  int warp;       ///< in the warpgroup
  int lane;
};

/// Named barriers; 0 is __syncthreads.
enum class NamedBarrier : int {
  kAll = 0,
  kFirstWarpgroup = 1,  ///< and the one after it for the second warpgroup
  kTailLead = 1 + kConsumerWarpgroups,
};

__device__ __forceinline__ void sync_warpgroup(int warpgroup) {
  ptx::named_barrier_sync<kWarpgroupThreads>(static_cast<int>(NamedBarrier::kFirstWarpgroup) +
                                             warpgroup);
}

}  // namespace distmoe::cuda
