// SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend of a build without CUDA.
#include "backend/backend.hpp"
#include "core/check.hpp"

namespace distmoe::cuda {

std::string why_unavailable() { return "this build of distmoe has no CUDA backend"; }

std::unique_ptr<Backend> make_backend(BackendSetup) {
  throw_error(ErrorCode::kUnsupported, why_unavailable());
}

}  // namespace distmoe::cuda
