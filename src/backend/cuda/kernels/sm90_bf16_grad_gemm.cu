// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/kernels/sm90_bf16_grad_gemm.cuh"

#include "backend/cuda/kernels/encode_map.cuh"
#include "backend/cuda/kernels/grouped_gemm_launch.cuh"

namespace distmoe::cuda {
bool make_w13_transposed_map(EncodeTiled encode, const W13Layout& w13, std::int64_t num_experts,
                             std::int64_t intermediate_dim, std::int64_t hidden_dim,
                             CUtensorMap* map) {
  const cuuint64_t dims[4] = {static_cast<cuuint64_t>(hidden_dim),
                              static_cast<cuuint64_t>(intermediate_dim), 2,
                              static_cast<cuuint64_t>(num_experts)};
  const std::int64_t strides[3] = {w13.row_stride, w13.half_stride, w13.expert_stride};
  const cuuint32_t box[4] = {kStageK, kStageK, 1, 1};
  return encode_map(encode, w13.gate, dims, strides, box, true, map);
}

bool make_w2_transposed_map(EncodeTiled encode, const W2Layout& w2, std::int64_t num_experts,
                            std::int64_t hidden_dim, std::int64_t intermediate_dim,
                            CUtensorMap* map) {
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(intermediate_dim),
                              static_cast<cuuint64_t>(hidden_dim),
                              static_cast<cuuint64_t>(num_experts)};
  const std::int64_t strides[2] = {w2.row_stride, w2.expert_stride};
  const cuuint32_t box[3] = {kStageK, kStageK, 1};
  return encode_map(encode, w2.data, dims, strides, box, true, map);
}

cudaError_t prepare_w13_saving() {
  return prepare_grouped_gemms<W13SavingPolicy<false>, W13SavingPolicy<true>>();
}

cudaError_t prepare_grad_gemm() {
  return prepare_grouped_gemms<W2DgradPolicy<false>, W2DgradPolicy<true>, W2LeanDgradPolicy<false>,
                               W2LeanDgradPolicy<true>, W13DgradPolicy>();
}

cudaError_t launch_w13_saving(const GroupedGemmArgs& args, const CUtensorMap& w13_map,
                              int num_blocks, cudaStream_t stream) {
  return args.swiglu.is_clamped != 0
             ? launch_grouped_gemm<W13SavingPolicy<true>>(args, w13_map, num_blocks, stream)
             : launch_grouped_gemm<W13SavingPolicy<false>>(args, w13_map, num_blocks, stream);
}

cudaError_t launch_w2_dgrad(const GroupedGemmArgs& args, const CUtensorMap& w2_map, int num_blocks,
                            cudaStream_t stream) {
  return args.swiglu.is_clamped != 0
             ? launch_grouped_gemm<W2DgradPolicy<true>>(args, w2_map, num_blocks, stream)
             : launch_grouped_gemm<W2DgradPolicy<false>>(args, w2_map, num_blocks, stream);
}

cudaError_t launch_w2_lean_dgrad(const GroupedGemmArgs& args, const CUtensorMap& w2_map,
                                 int num_blocks, cudaStream_t stream) {
  return args.swiglu.is_clamped != 0
             ? launch_grouped_gemm<W2LeanDgradPolicy<true>>(args, w2_map, num_blocks, stream)
             : launch_grouped_gemm<W2LeanDgradPolicy<false>>(args, w2_map, num_blocks, stream);
}

cudaError_t launch_w13_dgrad(const GroupedGemmArgs& args, const CUtensorMap& w13_map,
                             int num_blocks, cudaStream_t stream) {
  return launch_grouped_gemm<W13DgradPolicy>(args, w13_map, num_blocks, stream);
}

}  // namespace distmoe::cuda
