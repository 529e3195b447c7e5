// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {

/// Launches a kernel that begins with ptx::wait_for_earlier_kernels(): its launch and its start
/// overlap the end of the kernel before it.
template <typename... Parameters>
cudaError_t launch_early(void (*kernel)(Parameters...), const LaunchShape& shape,
                         cudaStream_t stream, const Parameters&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

/// One thread, after the kernel before it.
template <typename... Parameters>
cudaError_t launch_single(void (*kernel)(Parameters...), cudaStream_t stream,
                          const Parameters&... arguments) {
  constexpr LaunchShape kSingle = kSingleThreadLaunch;
  kernel<<<kSingle.blocks, kSingle.threads, kSingle.shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace distmoe::cuda
