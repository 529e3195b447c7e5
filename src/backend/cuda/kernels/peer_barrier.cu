// SPDX-License-Identifier: Apache-2.0
//
// One flag word per (peer, barrier) in each rank's window, monotone epochs that are kept on the
// device. A thread serves one peer: it stores this rank's epoch into the peer's window with
// system-scope release, then waits, bounded by the global timer, for the peer's epoch with acquire.
// A peer that does not come leaves a fault record; the rest of the call then computes nothing.
#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/kernels/peer_barrier.hpp"
#include "backend/cuda/ptx/flag.cuh"
#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {
namespace {

__global__ void peer_barrier(const __grid_constant__ PeerBarrierArgs args) {
  __shared__ std::uint32_t epoch;
  const auto slot = static_cast<std::int64_t>(args.barrier);
  if (threadIdx.x == 0) epoch = ++args.state->barrier_epoch[slot];
  // Earlier kernels of this stream are complete; the fence orders their writes before the flags.
  __threadfence_system();
  __syncthreads();
  const std::uint64_t deadline = ptx::global_timer_ns() + args.timeout_ns;
  for (int peer = static_cast<int>(threadIdx.x); peer < args.num_ranks;
       peer += kPeerBarrierThreads) {
    if (peer == args.rank) continue;
    auto* flags = reinterpret_cast<std::uint32_t*>(args.windows[peer].flags);
    ptx::store_release_sys(&flags[args.rank * kNumBarriers + slot], epoch);
  }
  for (int peer = static_cast<int>(threadIdx.x); peer < args.num_ranks;
       peer += kPeerBarrierThreads) {
    if (peer == args.rank) continue;
    const auto* flags = reinterpret_cast<const std::uint32_t*>(args.windows[args.rank].flags);
    const std::uint32_t* flag = &flags[peer * kNumBarriers + slot];
    // Epochs wrap: a peer is there when it is not behind.
    std::uint32_t seen = ptx::load_acquire_sys(flag);
    while (static_cast<std::int32_t>(seen - epoch) < 0) {
      if (ptx::global_timer_ns() > deadline) {
        if (atomicExch(&args.frame->failed, 1) == 0) {
          args.frame->fault = {FaultKind::kPeerTimeout, peer, 0, epoch, seen};
        }
        break;
      }
      seen = ptx::load_acquire_sys(flag);
    }
  }
}

}  // namespace

cudaError_t prepare_peer_barrier() { return load_kernels(peer_barrier); }

cudaError_t launch_peer_barrier(const PeerBarrierArgs& args, cudaStream_t stream) {
  constexpr LaunchShape kShape = kPeerBarrierLaunch;
  peer_barrier<<<kShape.blocks, kShape.threads, kShape.shared_bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace distmoe::cuda
