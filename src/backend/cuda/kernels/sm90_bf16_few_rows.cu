// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/kernels/sm90_bf16_few_rows.cuh"

#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/sm90_bf16_few_rows.hpp"
#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {

cudaError_t prepare_few_rows() {
  for (auto* kernel : {few_rows_kernel<false>, few_rows_kernel<true>}) {
    if (const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(sizeof(FewRowsStorage)))) {
      return error;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_few_rows(const FewRowsArgs& args, const CUtensorMap& w13_map,
                            const CUtensorMap& w2_map, int num_blocks, cudaStream_t stream) {
  auto* kernel = args.w13.swiglu.is_clamped != 0 ? few_rows_kernel<true> : few_rows_kernel<false>;
  return launch_early(kernel, few_rows_launch(num_blocks), stream, args, w13_map, w2_map);
}

}  // namespace distmoe::cuda
