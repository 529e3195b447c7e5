// SPDX-License-Identifier: Apache-2.0
//
// How a rank meets its peers on their devices, and leaves them.
#include <exception>

#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "core/log.hpp"
#include "layout/context_buffers.hpp"

namespace distmoe::cuda {

PeerBarrierArgs CudaBackend::barrier_args(PeerBarrier barrier) const {
  return {.state = memory_.buffer_of<CallState>(buffer_name::kCallState),
          .frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
          .windows = memory_.buffer_of<PeerWindows>(buffer_name::kPeerWindows),
          .rank = setup_.rank,
          .num_ranks = setup_.size,
          .barrier = barrier,
          .timeout_ns = timeout_ns()};
}

void CudaBackend::meet_peers(PeerBarrier barrier, cudaStream_t stream) {
  if (setup_.size == 1) return;
  PeerBarrierArgs args = barrier_args(barrier);
  if (order_peers_) {
    args.part = BarrierPart::kSignal;
    DISTMOE_CUDA_CHECK(launch_peer_barrier(args, stream));
    order_peers_(stream);
    args.part = BarrierPart::kWait;
  }
  DISTMOE_CUDA_CHECK(launch_peer_barrier(args, stream));
}

// NOTE: on the context's own stream, whatever the caller's does: a host that fails inside a call
// leaves no later kernel of that call behind.
void CudaBackend::leave() noexcept {
  int current = setup_.device;
  cudaGetDevice(&current);
  cudaSetDevice(setup_.device);
  // Kernels of a call that the host could not finish are waited for before their memory goes.
  try {
    if (call_in_progress_) mark_end_of_call(*call_in_progress_);
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, error.what());
  }
  if (setup_.size > 1 && is_connected_) {
    PeerBarrierArgs args = barrier_args(PeerBarrier::kPublished);
    args.part = BarrierPart::kLeave;
    launch_peer_barrier(args, own_stream_);
  }
  cudaSetDevice(current);
}

}  // namespace distmoe::cuda
