// SPDX-License-Identifier: Apache-2.0
//
// Barriers of a block and of a cluster: waits on mbarriers, arrivals at another block's mbarrier,
// named barriers.
#pragma once

#include <cuda/ptx>

#include <cstdint>

namespace distmoe::cuda::ptx {

namespace cccl = ::cuda::ptx;

/// The generic address of `pointer`'s twin in block `cta` of the cluster.
template <typename T>
__device__ __forceinline__ T* twin_in_cluster(T* pointer, std::uint32_t cta) {
  std::uint64_t twin;
  asm("mapa.u64 %0, %1, %2;"
      : "=l"(twin)
      : "l"(reinterpret_cast<std::uint64_t>(pointer)), "r"(cta));
  return reinterpret_cast<T*>(twin);
}

/// Waits for the phase of `parity` to complete. Only other roles of the same kernel complete it,
/// and their waits for peers are bounded, so that this one is; with DISTMOE_TRAP_ON_STALL a program
/// that looks for errors in a kernel ends instead of hanging.
__device__ __forceinline__ void wait(std::uint64_t* barrier, std::uint32_t parity) {
#ifdef DISTMOE_TRAP_ON_STALL
  for (int polls = 0; !cccl::mbarrier_try_wait_parity(barrier, parity);) {
    if (++polls > (1 << 22)) asm volatile("trap;");
  }
#else
  while (!cccl::mbarrier_try_wait_parity(barrier, parity)) {
  }
#endif
}

/// Arrives at a barrier of this block; what this thread did before is visible to who waits.
__device__ __forceinline__ void arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(barrier)))
               : "memory");
}

/// Arrives at a barrier found by twin_in_cluster, to say that this thread is done reading.
/// NOTE: CCCL's wrapper releases at cluster scope, which costs a device-wide fence per arrival.
/// Nothing that this thread wrote has to be seen by the other block, so that the default scope is
/// enough.
__device__ __forceinline__ void arrive_after_reads(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(barrier)))
               : "memory");
}

__device__ __forceinline__ void cluster_sync() {
  cccl::barrier_cluster_arrive();
  cccl::barrier_cluster_wait();
}

template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

/// Arrives without waiting; kThreads counts those who wait as well.
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace distmoe::cuda::ptx
