// SPDX-License-Identifier: Apache-2.0
//
// Host side of the grouped products of training over weights, on the kernel of
// sm90_bf16_grouped_gemm.cuh:
//   W13 saving  h2 as in a forward; h1[r] = bf16(W13 x[r] + bias13), gate then up, where it is kept
//   W2 DGRAD    grad_h1[r] = SwiGLU's gradient at h1[r] of bf16(W2^T grad_h3[r]); h2[r] beside it
//   lean        dy for grad_h3, and of the sums a = W2^T dy[r] also score_parts[r], sum_f a h2[r],
//               and grad_h2 = bf16(a * row_scores[r])
//   W13 DGRAD   result[r] = bf16(gate^T grad_gate[r] + up^T grad_up[r])     rows through addresses
#pragma once

#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.hpp"
#include "backend/cuda/tile/gemm_storage.hpp"

namespace distmoe::cuda {

/// Tensor maps of transposed weights, see make_w13_map.
bool make_w13_transposed_map(EncodeTiled encode, const W13Layout& w13, const WeightDims& dims,
                             CUtensorMap* map);
bool make_w2_transposed_map(EncodeTiled encode, const W2Layout& w2, const WeightDims& dims,
                            CUtensorMap* map);

/// Loads the kernels and raises their shared memory limit; once per device, outside of captures.
cudaError_t prepare_w13_saving();
cudaError_t prepare_grad_gemm();

/// As launch_w13_swiglu, and *args.h1 is where h1 goes.
cudaError_t launch_w13_saving(const GroupedGemmArgs& args, const CUtensorMap& w13_map,
                              int num_blocks, cudaStream_t stream);
/// m = F, k = D; tokens: grad_h3; result: h2; *args.h1 is read, args.grad_h1 written.
cudaError_t launch_w2_dgrad(const GroupedGemmArgs& args, const CUtensorMap& w2_map, int num_blocks,
                            cudaStream_t stream);
/// With a row's dy, unscaled, for grad_h3.
static_assert(kScorePartColumns == kWeightRowsPerWarpgroup);
cudaError_t launch_w2_lean_dgrad(const GroupedGemmArgs& args, const CUtensorMap& w2_map,
                                 int num_blocks, cudaStream_t stream);
/// m = D, k = F; tokens: rows of grad_h1, both halves.
cudaError_t launch_w13_dgrad(const GroupedGemmArgs& args, const CUtensorMap& w13_map,
                             int num_blocks, cudaStream_t stream);

}  // namespace distmoe::cuda
