// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend/cuda/kernels/call_state.hpp"

namespace distmoe::cuda {

/// Keeps the fault of a call, if there is one, where no earlier one is kept; by one thread.
__device__ inline void keep_first_fault(CallState& state, const FaultRecord& fault,
                                        std::int64_t call) {
  if (fault.kind == FaultKind::kNone || state.first_fault.kind != FaultKind::kNone) return;
  state.first_fault = fault;
  state.first_fault_call = call;
}

/// Of this call. The backward of a failed forward has failed without a fault.
__device__ inline void keep_first_fault(CallState& state, const CallFrame& frame) {
  keep_first_fault(state, frame.fault, is_final(frame.fault.kind) ? state.lost_call : frame.call);
}

}  // namespace distmoe::cuda
