// SPDX-License-Identifier: Apache-2.0
//
// The meeting of peer_meeting.cuh as a kernel: one block.
#include "backend/cuda/kernels/peer_barrier.hpp"

#include "backend/cuda/kernels/first_fault.cuh"
#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/kernels/peer_meeting.cuh"
#include "backend/cuda/ptx/grid_dependency.cuh"
#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {
namespace {

__global__ void peer_barrier(const __grid_constant__ PeerBarrierArgs args) {
  ptx::wait_for_earlier_kernels();
  meet_peers(args);
}

__global__ void keep_loss(CallState* state) {
  ptx::wait_for_earlier_kernels();
  keep_first_fault(*state, state->lost, state->lost_call);
}

}  // namespace

cudaError_t prepare_peer_barrier() { return load_kernels(peer_barrier, keep_loss); }

cudaError_t launch_peer_barrier(const PeerBarrierArgs& args, cudaStream_t stream) {
  return launch_early(peer_barrier, kPeerBarrierLaunch, stream, args);
}

cudaError_t launch_keep_loss(CallState* state, cudaStream_t stream) {
  return launch_early(keep_loss, kSingleThreadLaunch, stream, state);
}

}  // namespace distmoe::cuda
