// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

namespace distmoe::cuda {

/// Loads kernels on the current device now. CUDA loads a kernel at its first launch otherwise, and
/// that may wait for the device: for ever where a peer on the same device already waits in its
/// barrier for this rank.
template <typename... Kernels>
cudaError_t load_kernels(Kernels... kernels) {
  cudaFuncAttributes attributes;
  cudaError_t first = cudaSuccess;
  const auto load = [&](auto kernel) {
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (first == cudaSuccess) first = error;
  };
  (load(kernels), ...);
  return first;
}

}  // namespace distmoe::cuda
