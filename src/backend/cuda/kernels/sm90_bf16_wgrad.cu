// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/kernels/sm90_bf16_wgrad.cuh"

#include <cstddef>

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
void launch(const WgradArgs& args, const WgradMaps& maps, int num_blocks, cudaStream_t stream) {
  wgrad_kernel<Policy><<<num_blocks, kGemmThreads, sizeof(WgradStorage), stream>>>(args, maps);
}

template <bool kIsFloat>
auto launcher_of(const WgradArgs& args) {
  if (args.out.accumulates != 0) return launch<WgradPolicy<kIsFloat, true, false>>;
  // No box has rows of both halves.
  const bool is_staged = args.out.interleaved_rows % kGradientBoxRows == 0;
  return is_staged ? launch<WgradPolicy<kIsFloat, false, true>>
                   : launch<WgradPolicy<kIsFloat, false, false>>;
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

bool make_gradient_maps(EncodeTiled encode, const WeightGradient& out, std::int64_t num_experts,
                        std::int64_t m, std::int64_t n, WgradMaps* maps) {
  const std::int64_t half_rows = rows_of_half(out, m);
  const std::int64_t halves = m / half_rows;
  const std::int64_t element_bytes = out.is_float != 0 ? 4 : 2;
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(n), static_cast<cuuint64_t>(half_rows),
                              static_cast<cuuint64_t>(num_experts)};
  const std::int64_t strides[2] = {halves * n, m * n};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(kRowBytes / element_bytes), kGradientBoxRows,
                             1};
  for (std::int64_t half = 0; half < halves; ++half) {
    const auto* first = static_cast<const std::byte*>(out.data) + half * n * element_bytes;
    CUtensorMap* map = half == 0 ? &maps->out : &maps->second_half;
    if (!encode_map(encode, first, dims, strides, box, false, map, out.is_float != 0)) return false;
  }
  return true;
}

cudaError_t prepare_wgrad() {
  for (const cudaError_t status :
       {prepare<WgradPolicy<false, false, true>>(), prepare<WgradPolicy<false, false, false>>(),
        prepare<WgradPolicy<false, true, false>>(), prepare<WgradPolicy<true, false, true>>(),
        prepare<WgradPolicy<true, false, false>>(), prepare<WgradPolicy<true, true, false>>()}) {
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t launch_wgrad(const WgradArgs& args, const WgradMaps& maps, int num_blocks,
                         cudaStream_t stream) {
  const auto start = args.out.is_float != 0 ? launcher_of<true>(args) : launcher_of<false>(args);
  start(args, maps, num_blocks, stream);
  return cudaGetLastError();
}

}  // namespace distmoe::cuda
