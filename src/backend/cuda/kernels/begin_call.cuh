// SPDX-License-Identifier: Apache-2.0
//
// The beginning of a call on the device, of a forward as of a backward.
#pragma once

#include "backend/cuda/kernels/call_state.hpp"

namespace distmoe::cuda {

/// Counts the call and returns its frame. Failed from the start are the call of a rank that has
/// lost a peer, with the fault of that, and one whose host refused its arguments. By one thread.
__device__ inline CallFrame next_frame(CallState& state, bool is_refused, std::int32_t rank) {
  ++state.num_calls;
  // 0 means that nothing has arrived.
  state.gather_epoch = state.gather_epoch == UINT32_MAX ? 1 : state.gather_epoch + 1;
  CallFrame frame{};
  frame.gather_epoch = state.gather_epoch;
  if (state.lost.kind != FaultKind::kNone) {
    frame.failed = 1;
    frame.fault = state.lost;
  } else if (is_refused) {
    frame.failed = 1;
    frame.fault = {FaultKind::kRefusedByPeer, rank, 0, 0, 0};
  }
  return frame;
}

/// What peers find of this rank in a call; they find a refusal here and fail by themselves. A rank
/// that has lost a peer leaves its windows as they are: another one may still read them.
/// NOTE: the frame says which, since a host that leaves may change the state meanwhile.
__device__ inline void publish_header(const CallFrame& frame, std::uint64_t ids_window,
                                      std::int64_t num_tokens, bool is_refused) {
  if (is_final(frame.fault.kind)) return;
  *reinterpret_cast<PublishedHeader*>(ids_window) = {num_tokens,
                                                     is_refused ? kRefusedCall : kNoBadRoute, 0};
}

}  // namespace distmoe::cuda
