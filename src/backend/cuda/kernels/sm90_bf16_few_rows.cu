// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/kernels/sm90_bf16_few_rows.cuh"

#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/sm90_bf16_few_rows.hpp"
#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {

namespace {

using Kernel = void (*)(FewRowsArgs, CUtensorMap, CUtensorMap);

Kernel kernel_of(bool is_clamped, bool has_peers) {
  if (is_clamped) return has_peers ? few_rows_kernel<true, true> : few_rows_kernel<true, false>;
  return has_peers ? few_rows_kernel<false, true> : few_rows_kernel<false, false>;
}

}  // namespace

cudaError_t prepare_few_rows() {
  for (const bool is_clamped : {false, true}) {
    for (const bool has_peers : {false, true}) {
      if (const cudaError_t error = cudaFuncSetAttribute(
              kernel_of(is_clamped, has_peers), cudaFuncAttributeMaxDynamicSharedMemorySize,
              static_cast<int>(sizeof(FewRowsStorage)))) {
        return error;
      }
    }
  }
  return cudaSuccess;
}

cudaError_t launch_few_rows(const FewRowsArgs& args, const CUtensorMap& w13_map,
                            const CUtensorMap& w2_map, int num_blocks, cudaStream_t stream) {
  return launch_early(kernel_of(args.w13.swiglu.is_clamped != 0, args.has_peers != 0),
                      few_rows_launch(num_blocks), stream, args, w13_map, w2_map);
}

}  // namespace distmoe::cuda
