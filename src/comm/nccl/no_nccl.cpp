// SPDX-License-Identifier: Apache-2.0
//
// The NCCL engine of a build without CUDA.
#include "comm/nccl_engine.hpp"
#include "core/check.hpp"
#include "distmoe/communicator.hpp"

namespace distmoe {

std::string nccl_engine_problem() { return "this build of distmoe has no CUDA backend"; }

std::string nccl_library_text() { return {}; }

// NOLINTNEXTLINE(performance-unnecessary-value-param): the signature is the other build's
std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<Communicator>, int,
                                                     Communicator::Timeout) {
  throw_error(ErrorCode::kUnsupported,
              concat("the NCCL engine cannot be used: ", nccl_engine_problem()));
}

}  // namespace distmoe
