// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/fault_text.hpp"

#include "core/check.hpp"

namespace distmoe::cuda {

void throw_fault(const FaultRecord& fault, std::int64_t call, const BackendSetup& setup) {
  switch (fault.kind) {
    case FaultKind::kBadExpertId:
      throw_error(
          ErrorCode::kInvalidArgument,
          concat("call ", call, ": topk_ids[", fault.index / setup.config.top_k, ", ",
                 fault.index % setup.config.top_k, "] of rank ", fault.rank, " is ", fault.actual,
                 "; legal are 0 to ", fault.expected - 1, ", and -1 for no expert"));
    case FaultKind::kCapacityExceeded:
      throw_error(ErrorCode::kCapacityExceeded,
                  concat("call ", call, " routes more rows to rank ", fault.rank,
                         " than the memory plan has: ", fault.actual, " required, ", fault.expected,
                         " available (this is rank ", setup.rank,
                         "); a larger device_scratch_capacity_factor plans for more",
                         setup.config.distinct_experts && fault.index != 0
                             ? "; a token names an expert twice, which distinct_experts = false "
                               "plans for"
                             : ""));
    case FaultKind::kPeerTimeout:
      throw_error(ErrorCode::kPeerLost,
                  concat("call ", call, ": rank ", fault.rank, " did not arrive within ",
                         setup.timeout.count(), " ms (this is rank ", setup.rank, ")"));
    case FaultKind::kGatherTimeout:
      throw_error(
          ErrorCode::kDeviceFault,
          concat("call ", call, ": rows of gather chunk ", fault.index, " did not arrive on rank ",
                 setup.rank, " within ", setup.timeout.count(), " ms"));
    case FaultKind::kRefusedByPeer:
      throw_error(static_cast<ErrorCode>(fault.actual),
                  concat("rank ", fault.rank, " refused its arguments of call ", call,
                         " (this is rank ", setup.rank, ")"));
    case FaultKind::kFailedOnPeer:
      throw_error(ErrorCode::kPeerLost,
                  concat("call ", call, ": rank ", fault.rank,
                         " left the group or gave the call up, and has no results for rank ",
                         setup.rank, "; its own error says why"));
    case FaultKind::kLeft:
      throw_error(ErrorCode::kPeerLost,
                  concat("rank ", fault.rank, " left its peers after call ", call));
    case FaultKind::kNone: break;
  }
  throw_error(ErrorCode::kInternal, concat("unknown fault ", static_cast<int>(fault.kind)));
}

}  // namespace distmoe::cuda
