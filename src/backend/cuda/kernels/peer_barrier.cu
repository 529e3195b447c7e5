// SPDX-License-Identifier: Apache-2.0
//
// One flag word per (peer, barrier) in each rank's window, monotone epochs that are kept on the
// device. A thread serves one peer: it stores this rank's epoch into the peer's window with
// system-scope release, then waits, bounded by the global timer, for the peer's epoch with acquire.
// A peer that does not come leaves a fault record; the rest of the call then computes nothing.
//
// The lowest bit of a word says that the rank's call has failed, so that a peer whose call goes on
// does not take what the rank never computed for results: it fails too.
#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/kernels/peer_barrier.hpp"
#include "backend/cuda/ptx/flag.cuh"
#include "backend/cuda/ptx/grid_dependency.cuh"
#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {
namespace {

/// Keeps the first fault of the call.
__device__ void fail(const PeerBarrierArgs& args, const FaultRecord& fault) {
  if (atomicExch(&args.frame->failed, 1) == 0) args.frame->fault = fault;
}

__device__ void signal_peers(const PeerBarrierArgs& args, std::uint32_t epoch) {
  const auto slot = static_cast<std::int64_t>(args.barrier);
  for (int peer = static_cast<int>(threadIdx.x); peer < args.num_ranks;
       peer += kPeerBarrierThreads) {
    if (peer == args.rank) continue;
    auto* flags = reinterpret_cast<std::uint32_t*>(args.windows[peer].flags);
    ptx::store_release_sys(&flags[args.rank * kNumBarriers + slot], epoch);
  }
}

/// How far `seen` is beyond the epoch; words wrap.
__device__ std::int32_t distance(std::uint32_t seen, std::uint32_t epoch) {
  return static_cast<std::int32_t>(seen - (epoch & ~1u));
}

__device__ void wait_for_peers(const PeerBarrierArgs& args, std::uint32_t epoch) {
  const auto slot = static_cast<std::int64_t>(args.barrier);
  const std::uint64_t deadline = ptx::global_timer_ns() + args.timeout_ns;
  const auto* flags = reinterpret_cast<const std::uint32_t*>(args.windows[args.rank].flags);
  for (int peer = static_cast<int>(threadIdx.x); peer < args.num_ranks;
       peer += kPeerBarrierThreads) {
    if (peer == args.rank) continue;
    const std::uint32_t* flag = &flags[peer * kNumBarriers + slot];
    std::uint32_t seen = ptx::load_acquire_sys(flag);
    while (distance(seen, epoch) < 0) {
      if (ptx::global_timer_ns() > deadline) {
        fail(args, {FaultKind::kPeerTimeout, peer, 0, epoch / 2, seen / 2});
        break;
      }
      seen = ptx::load_acquire_sys(flag);
    }
    // A peer that is ahead did not wait for this rank: its call failed.
    if (distance(seen, epoch) > 0) {
      fail(args, {FaultKind::kFailedOnPeer, peer, 0, epoch / 2, seen / 2});
    }
  }
}

__global__ void peer_barrier(const __grid_constant__ PeerBarrierArgs args) {
  __shared__ std::uint32_t epoch;
  ptx::wait_for_earlier_kernels();
  const auto slot = static_cast<std::int64_t>(args.barrier);
  if (threadIdx.x == 0) {
    std::uint32_t& count = args.state->barrier_epoch[slot];
    // In steps of two: the lowest bit is free.
    if (args.part != BarrierPart::kWait) count += 2;
    epoch = count | (args.frame->failed != 0 ? 1 : 0);
  }
  // Earlier kernels of this stream are complete; the fence orders their writes before the flags.
  __threadfence_system();
  __syncthreads();
  if (args.part != BarrierPart::kWait) signal_peers(args, epoch);
  if (args.part != BarrierPart::kSignal) wait_for_peers(args, epoch);
}

}  // namespace

cudaError_t prepare_peer_barrier() { return load_kernels(peer_barrier); }

cudaError_t launch_peer_barrier(const PeerBarrierArgs& args, cudaStream_t stream) {
  return launch_early(peer_barrier, kPeerBarrierLaunch, stream, args);
}

}  // namespace distmoe::cuda
