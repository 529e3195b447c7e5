// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/cuda_check.hpp"

#include "core/check.hpp"

namespace distmoe::cuda {

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) [[likely]]
    return;
  const ErrorCode code =
      error == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kDeviceFault;
  throw_error(code, concat("CUDA: ", cudaGetErrorString(error), " (", cudaGetErrorName(error),
                           ") from ", call));
}

}  // namespace distmoe::cuda
