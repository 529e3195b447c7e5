// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/kernels/sm90_bf16_grad_gemm.cuh"

#include "backend/cuda/kernels/encode_map.cuh"
#include "backend/cuda/kernels/grouped_gemm_launch.cuh"

namespace distmoe::cuda {
bool make_w13_transposed_map(EncodeTiled encode, const W13Layout& w13, const WeightDims& dims,
                             CUtensorMap* map) {
  return encode_map<4>(encode,
                       {.data = w13.gate,
                        .dims = {static_cast<cuuint64_t>(dims.hidden_dim),
                                 static_cast<cuuint64_t>(dims.intermediate_dim), 2,
                                 static_cast<cuuint64_t>(dims.num_experts)},
                        .strides = {w13.row_stride, w13.half_stride, w13.expert_stride},
                        .box = {kStageK, kStageK, 1, 1}},
                       map);
}

bool make_w2_transposed_map(EncodeTiled encode, const W2Layout& w2, const WeightDims& dims,
                            CUtensorMap* map) {
  return encode_map<3>(encode,
                       {.data = w2.data,
                        .dims = {static_cast<cuuint64_t>(dims.intermediate_dim),
                                 static_cast<cuuint64_t>(dims.hidden_dim),
                                 static_cast<cuuint64_t>(dims.num_experts)},
                        .strides = {w2.row_stride, w2.expert_stride},
                        .box = {kStageK, kStageK, 1}},
                       map);
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
