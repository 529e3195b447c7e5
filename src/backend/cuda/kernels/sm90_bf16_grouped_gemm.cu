// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.cuh"

#include "backend/cuda/kernels/encode_map.cuh"
#include "backend/cuda/kernels/grouped_gemm_launch.cuh"
#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.hpp"

namespace distmoe::cuda {
bool make_w13_map(EncodeTiled encode, const W13Layout& w13, const WeightDims& dims,
                  const WeightBox& box, CUtensorMap* map) {
  return encode_map<5>(
      encode,
      {.data = w13.gate,
       .dims = {static_cast<cuuint64_t>(dims.hidden_dim), 8, 2,
                static_cast<cuuint64_t>(dims.intermediate_dim / 8),
                static_cast<cuuint64_t>(dims.num_experts)},
       .strides = {w13.row_stride, w13.half_stride, 8 * w13.row_stride, w13.expert_stride},
       .box = {kStageK, 8, 2, static_cast<cuuint32_t>(box.rows / 16), 1},
       .reads_ahead = box.reads_ahead},
      map);
}

bool make_w2_map(EncodeTiled encode, const W2Layout& w2, const WeightDims& dims,
                 const WeightBox& box, CUtensorMap* map) {
  return encode_map<3>(encode,
                       {.data = w2.data,
                        .dims = {static_cast<cuuint64_t>(dims.intermediate_dim),
                                 static_cast<cuuint64_t>(dims.hidden_dim),
                                 static_cast<cuuint64_t>(dims.num_experts)},
                        .strides = {w2.row_stride, w2.expert_stride},
                        .box = {kStageK, static_cast<cuuint32_t>(box.rows), 1},
                        .reads_ahead = box.reads_ahead},
                       map);
}

cudaError_t prepare_grouped_gemm() {
  return prepare_grouped_gemms<W13Policy<false>, W13Policy<true>, W2Policy>();
}

cudaError_t launch_w13_swiglu(const GroupedGemmArgs& args, const CUtensorMap& w13_map,
                              int num_blocks, cudaStream_t stream) {
  return args.swiglu.is_clamped != 0
             ? launch_grouped_gemm<W13Policy<true>>(args, w13_map, num_blocks, stream)
             : launch_grouped_gemm<W13Policy<false>>(args, w13_map, num_blocks, stream);
}

cudaError_t launch_w2_scatter(const GroupedGemmArgs& args, const CUtensorMap& w2_map,
                              int num_blocks, cudaStream_t stream) {
  return launch_grouped_gemm<W2Policy>(args, w2_map, num_blocks, stream);
}

}  // namespace distmoe::cuda
