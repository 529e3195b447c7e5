// SPDX-License-Identifier: Apache-2.0
//
// The CUDA half of `distmoe bench` in a build without CUDA.
#include "backend/backend.hpp"
#include "bench/bench_device.hpp"
#include "core/check.hpp"

namespace distmoe::tools {

std::unique_ptr<BenchDevice> make_cuda_bench_device(int /*device*/) {
  throw_error(ErrorCode::kUnsupported, concat("CUDA is not available: ", cuda::why_unavailable()));
}

}  // namespace distmoe::tools
