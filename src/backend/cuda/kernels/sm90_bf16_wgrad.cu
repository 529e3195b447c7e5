// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/kernels/sm90_bf16_wgrad.cuh"

#include "backend/cuda/kernels/encode_map.cuh"
#include "backend/cuda/kernels/load_kernels.hpp"

namespace distmoe::cuda {
namespace {

template <typename Policy>
cudaError_t prepare() {
  return cudaFuncSetAttribute(wgrad_kernel<Policy>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              sizeof(WgradStorage));
}

template <typename Policy>
void launch(const WgradArgs& args, const CUtensorMap& grads_map, const CUtensorMap& activations_map,
            int num_blocks, cudaStream_t stream) {
  wgrad_kernel<Policy><<<num_blocks, kGemmThreads, sizeof(WgradStorage), stream>>>(args, grads_map,
                                                                                   activations_map);
}

}  // namespace

bool make_activation_map(EncodeTiled encode, const void* buffer, std::int64_t buffer_bytes,
                         std::int64_t num_rows, std::int64_t width, CUtensorMap* map) {
  // Regions start at any multiple of 128 bytes, rows follow each other without gaps: the two
  // dimensions overlap. Columns beyond a row's last belong to the next row and reach only
  // gradients that are not stored.
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(width < kStageK ? width : kStageK),
                              static_cast<cuuint64_t>(num_rows),
                              static_cast<cuuint64_t>(buffer_bytes / kRowBytes)};
  const std::int64_t strides[2] = {width, kStageK};
  const cuuint32_t box[3] = {kStageK, kStageK, kWgradChunksA};
  static_assert(kWgradChunksA == kWgradChunksB);
  return encode_map(encode, buffer, dims, strides, box, true, map);
}

cudaError_t prepare_wgrad() {
  for (const cudaError_t status :
       {prepare<WgradPolicy<false, false>>(), prepare<WgradPolicy<false, true>>(),
        prepare<WgradPolicy<true, false>>(), prepare<WgradPolicy<true, true>>()}) {
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t launch_wgrad(const WgradArgs& args, const CUtensorMap& grads_map,
                         const CUtensorMap& activations_map, int num_blocks, cudaStream_t stream) {
  const auto start = args.out.is_float != 0
                         ? (args.out.accumulates != 0 ? launch<WgradPolicy<true, true>>
                                                      : launch<WgradPolicy<true, false>>)
                         : (args.out.accumulates != 0 ? launch<WgradPolicy<false, true>>
                                                      : launch<WgradPolicy<false, false>>);
  start(args, grads_map, activations_map, num_blocks, stream);
  return cudaGetLastError();
}

}  // namespace distmoe::cuda
