// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace distmoe::cuda {

/// Score of a route of this rank, as FP32. `Args` names the caller's tensor: scores, its strides in
/// elements and its type.
template <typename Args>
__device__ __forceinline__ float load_score(const Args& args, std::int64_t token, std::int64_t k) {
  const std::int64_t offset = token * args.score_token_stride + k * args.score_k_stride;
  return args.scores_are_bf16 != 0
             ? __bfloat162float(static_cast<const __nv_bfloat16*>(args.scores)[offset])
             : static_cast<const float*>(args.scores)[offset];
}

}  // namespace distmoe::cuda
