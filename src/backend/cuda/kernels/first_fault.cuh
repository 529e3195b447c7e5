// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend/cuda/kernels/call_state.hpp"

namespace distmoe::cuda {

/// Keeps the fault of the call, if there is one, where no earlier one is kept; by one thread of the
/// call.
__device__ inline void keep_first_fault(CallState& state, const FaultRecord& fault) {
  if (fault.kind == FaultKind::kNone || state.first_fault.kind != FaultKind::kNone) return;
  state.first_fault = fault;
  state.first_fault_call =
      is_final(fault.kind) ? state.lost_call : static_cast<std::int64_t>(state.num_calls);
}

/// Likewise. The backward of a failed forward has failed without a fault.
__device__ inline void keep_first_fault(CallState& state, const CallFrame& frame) {
  keep_first_fault(state, frame.fault);
}

}  // namespace distmoe::cuda
