// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/kernels/sm90_bf16_wgrad.cuh"

#include <cstddef>

#include "backend/cuda/kernels/encode_map.cuh"
#include "backend/cuda/kernels/load_kernels.hpp"

namespace distmoe::cuda {
namespace {

template <typename Policy>
cudaError_t prepare() {
  static_assert(sizeof(typename Policy::Storage) <= kMaxSharedBytes,
                "shared memory of a Hopper block");
  return cudaFuncSetAttribute(wgrad_kernel<Policy>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              sizeof(typename Policy::Storage));
}

template <typename Policy>
void launch(const WgradArgs& args, const WgradMaps& maps, int num_blocks, cudaStream_t stream) {
  constexpr std::size_t kSharedBytes = sizeof(typename Policy::Storage);
  wgrad_kernel<Policy><<<num_blocks, kGemmThreads, kSharedBytes, stream>>>(args, maps);
}

template <bool kIsFloat>
auto launcher_of(const WgradArgs& args) {
  const bool accumulates = args.out.accumulates != 0;
  // No box has rows of both halves.
  if (args.out.interleaved_rows % kGradientBoxRows == 0) {
    return accumulates ? launch<WgradPolicy<kIsFloat, true, true>>
                       : launch<WgradPolicy<kIsFloat, false, true>>;
  }
  return accumulates ? launch<WgradPolicy<kIsFloat, true, false>>
                     : launch<WgradPolicy<kIsFloat, false, false>>;
}

template <bool kIsFloat>
cudaError_t prepare_all() {
  for (const cudaError_t status : {prepare<WgradPolicy<kIsFloat, false, false>>(),
                                   prepare<WgradPolicy<kIsFloat, false, true>>(),
                                   prepare<WgradPolicy<kIsFloat, true, false>>(),
                                   prepare<WgradPolicy<kIsFloat, true, true>>()}) {
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

bool make_operand_map(EncodeTiled encode, const ActivationBuffer& buffer, std::int64_t width,
                      CUtensorMap* map) {
  // Regions start at any multiple of 128 bytes, rows follow each other without gaps: the two
  // dimensions overlap. Columns beyond a row's last belong to the next row and reach only
  // gradients that are not stored.
  constexpr std::int64_t kColumns = kWgradChunkColumns;
  static_assert(kWgradChunksA == kWgradChunksB);
  return encode_map<3>(encode,
                       {.data = buffer.data,
                        .dims = {static_cast<cuuint64_t>(width < kColumns ? width : kColumns),
                                 static_cast<cuuint64_t>(buffer.num_rows),
                                 static_cast<cuuint64_t>(buffer.bytes / kRowBytes)},
                        .strides = {width, kColumns},
                        .box = {kWgradChunkColumns, kWgradStageRows, kWgradChunksA}},
                       map);
}

bool make_gradient_maps(EncodeTiled encode, const WeightGradient& out, std::int64_t num_experts,
                        std::int64_t m, std::int64_t n, WgradMaps* maps) {
  const std::int64_t half_rows = rows_of_half(out, m);
  const std::int64_t halves = m / half_rows;
  const std::int64_t element_bytes = out.is_float != 0 ? 4 : 2;
  for (std::int64_t half = 0; half < halves; ++half) {
    const bool is_made = encode_map<3>(
        encode,
        {.data = static_cast<const std::byte*>(out.data) + half * n * element_bytes,
         .dims = {static_cast<cuuint64_t>(n), static_cast<cuuint64_t>(half_rows),
                  static_cast<cuuint64_t>(num_experts)},
         .strides = {halves * n, m * n},
         .box = {static_cast<cuuint32_t>(kRowBytes / element_bytes), kGradientBoxRows, 1},
         .reads_ahead = false,
         .is_float = out.is_float != 0},
        half == 0 ? &maps->out : &maps->second_half);
    if (!is_made) return false;
  }
  return true;
}

}  // namespace

bool make_wgrad_maps(EncodeTiled encode, const ActivationBuffer& operands, const WgradArgs& args,
                     WgradMaps* maps) {
  return make_operand_map(encode, operands, args.m, &maps->grads) &&
         make_operand_map(encode, operands, args.n, &maps->activations) &&
         make_gradient_maps(encode, args.out, args.num_experts, args.m, args.n, maps);
}

cudaError_t prepare_wgrad() {
  const cudaError_t status = prepare_all<false>();
  return status == cudaSuccess ? prepare_all<true>() : status;
}

cudaError_t launch_wgrad(const WgradArgs& args, const WgradMaps& maps, int num_blocks,
                         cudaStream_t stream) {
  const auto start = args.out.is_float != 0 ? launcher_of<true>(args) : launcher_of<false>(args);
  start(args, maps, num_blocks, stream);
  return cudaGetLastError();
}

}  // namespace distmoe::cuda
