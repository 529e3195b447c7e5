// SPDX-License-Identifier: Apache-2.0
//
// Host side of every policy of grouped_gemm_kernel.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <initializer_list>

#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.cuh"
#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {

/// Lets the kernels of these policies use the shared memory that they need.
template <typename... Policies>
cudaError_t prepare_grouped_gemms() {
  for (const cudaError_t status : {cudaFuncSetAttribute(grouped_gemm_kernel<Policies>,
                                                        cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                        sizeof(GemmStorage))...}) {
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

template <typename Policy>
cudaError_t launch_grouped_gemm(const GroupedGemmArgs& args, const CUtensorMap& map, int num_blocks,
                                cudaStream_t stream) {
  return launch_early(grouped_gemm_kernel<Policy>, grouped_gemm_launch(num_blocks), stream, args,
                      map);
}

}  // namespace distmoe::cuda
