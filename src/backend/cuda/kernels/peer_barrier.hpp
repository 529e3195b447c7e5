// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/kernels/call_state.hpp"

namespace distmoe::cuda {

/// What a launch does of a barrier.
enum class BarrierPart : std::int32_t {
  kWhole = 0,
  kSignal = 1,  ///< tells the peers that this rank is here
  kWait = 2,    ///< waits for the peers; after a launch of kSignal
  kLeave = 3,   ///< tells the peers that this rank comes no more; the barrier has no meaning
};

struct PeerBarrierArgs {
  CallState* state = nullptr;
  CallFrame* frame = nullptr;
  const PeerWindows* windows = nullptr;  ///< [num_ranks]
  std::int32_t rank = 0;
  std::int32_t num_ranks = 1;
  PeerBarrier barrier = PeerBarrier::kPublished;
  BarrierPart part = BarrierPart::kWhole;
  std::uint64_t timeout_ns = 0;
};

/// Loads the kernels on the current device; once, outside of captures, before any call.
cudaError_t prepare_peer_barrier();

/// Everything that this rank's stream did before is visible to a peer that has passed the barrier.
/// One block: ranks that share a device are always resident together.
cudaError_t launch_peer_barrier(const PeerBarrierArgs& args, cudaStream_t stream);

/// Keeps why this rank is lost, if it is, as the first fault: of a call that failed before the
/// peers met and has no other kernel to say so.
cudaError_t launch_keep_loss(CallState* state, cudaStream_t stream);

}  // namespace distmoe::cuda
