// SPDX-License-Identifier: Apache-2.0
//
// The beginning of a call on the device, of a forward as of a backward.
#pragma once

#include "backend/cuda/kernels/call_state.hpp"

namespace distmoe::cuda {

/// The frame of a new call. Failed from the start are the call of a rank that has lost a peer, with
/// the fault of that, and one whose host refuses its arguments. By one thread.
__device__ inline CallFrame next_frame(CallState& state, const CallHead& head) {
  // 0 means that nothing has arrived.
  state.gather_epoch = state.gather_epoch == UINT32_MAX ? 1 : state.gather_epoch + 1;
  CallFrame frame{};
  frame.call = head.call;
  frame.gather_epoch = state.gather_epoch;
  if (state.lost.kind != FaultKind::kNone) {
    frame.failed = 1;
    frame.fault = state.lost;
  } else if (head.refusal != kNotRefused) {
    frame.failed = 1;
    frame.fault = {FaultKind::kRefusedByPeer, head.rank, 0, 0, head.refusal};
  }
  return frame;
}

/// What peers find of this rank in a new call; they find a refusal here and fail by themselves. A
/// rank that has lost a peer leaves its windows as they are: another one may still read them.
/// NOTE: the frame says which, since a host that leaves may change the state meanwhile.
__device__ inline void publish_header(const CallFrame& frame, std::uint64_t ids_window,
                                      std::int64_t num_tokens) {
  if (is_final(frame.fault.kind)) return;
  const bool is_refused = frame.fault.kind == FaultKind::kRefusedByPeer;
  *reinterpret_cast<PublishedHeader*>(ids_window) = {
      num_tokens, is_refused ? kRefusedCall : kNoBadRoute, is_refused ? frame.fault.actual : 0};
}

/// The fault of a call that `rank` refused, as its header says.
__device__ inline FaultRecord refusal_of(std::int32_t rank, const PublishedHeader& header) {
  return {FaultKind::kRefusedByPeer, rank, 0, 0, header.bad_id};
}

}  // namespace distmoe::cuda
