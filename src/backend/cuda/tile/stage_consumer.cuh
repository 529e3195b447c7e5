// SPDX-License-Identifier: Apache-2.0
//
// How the consumer warps of a GEMM go through its ring of operand stages: Storage has the barriers
// full[kNumStages] and empty[kNumStages], the latter of both blocks of a cluster.
#pragma once

#include <cuda/ptx>

#include <cstdint>

#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/tile/gemm_storage.hpp"
#include "backend/cuda/tile/named_barrier.cuh"
#include "backend/cuda/tile/ring_position.cuh"

namespace distmoe::cuda {

using StagePosition = RingPosition<kStages>;

/// A consumer warp's way through the stages.
template <typename Storage>
class StageConsumer {
 public:
  __device__ StageConsumer(Storage& shared, int lane) : shared_(shared) {
    // Lanes 0 and 1 release stages, each towards one block.
    releases_ = lane < kClusterBlocks;
    if (releases_) empty_ = ptx::twin_in_cluster(shared.empty, static_cast<std::uint32_t>(lane));
  }

  __device__ __forceinline__ int acquire() {
    ptx::wait(&shared_.full[stage_.slot], stage_.parity);
    return stage_.slot;
  }
  __device__ __forceinline__ void advance() { stage_.advance(); }
  __device__ __forceinline__ void release(int slot) {
    if (releases_) ptx::arrive_after_reads(empty_ + slot);
  }

 private:
  Storage& shared_;
  std::uint64_t* empty_ = nullptr;
  RingPosition<Storage::kNumStages> stage_;
  bool releases_;
};

/// At the end of a tile warpgroup 0 goes first: warpgroup 1 holds its last kTailLead stages back
/// until the other has issued all of its own. Then each has the tensor cores for itself while the
/// other is in its epilogue. NOTE: worth 1.5-3 % with K up to 7168; a lead at the start of tiles
/// brought nothing.
template <int kRingStages, int kTailLead>
class WarpgroupOrder {
 public:
  __device__ __forceinline__ WarpgroupOrder(int num_stages, int warpgroup)
      : is_first_(warpgroup == 0) {
    // With fewer stages than that warpgroup 0 could come to the barrier twice before warpgroup 1
    // comes once: it is at most a ring ahead of what warpgroup 1 has released.
    if (num_stages > kTailLead && num_stages > kRingStages - kTailLead) {
      meet_at_ = is_first_ ? num_stages : num_stages - kTailLead;
    }
  }

  /// Before the products of `stage`; after all of them with the number of stages.
  __device__ __forceinline__ void at(int stage) const {
    constexpr int kThreads = kConsumerWarpgroups * kWarpgroupThreads;
    constexpr int kBarrier = static_cast<int>(NamedBarrier::kTailLead);
    if (stage != meet_at_) return;
    if (is_first_) {
      ptx::named_barrier_arrive<kThreads>(kBarrier);
    } else {
      ptx::named_barrier_sync<kThreads>(kBarrier);
    }
  }

 private:
  // Warpgroup 1 releases a stage when it has issued the next one, so that with a longer lead the
  // last stages of warpgroup 0 could never be loaded.
  static_assert(kTailLead < kRingStages);

  bool is_first_;
  int meet_at_ = -1;
};
using GemmWarpgroupOrder = WarpgroupOrder<kStages, 3>;

/// A warpgroup that has nothing to compute of a tile only passes its stages on.
template <typename Storage, typename Order>
__device__ __forceinline__ void skip_stages(StageConsumer<Storage>& stages, int num_stages,
                                            const Order& order) {
  for (int stage = 0; stage < num_stages; ++stage) {
    order.at(stage);
    stages.release(stages.acquire());
    stages.advance();
  }
  order.at(num_stages);
}

}  // namespace distmoe::cuda
