// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend/cuda/kernels/training_rows.hpp"

namespace distmoe::cuda {

/// Whether windows have a place for what a row stands for.
__device__ inline bool is_within(const RouteLimits& limits, const RowOrigin& origin) {
  return origin.source >= 0 && origin.source < limits.num_ranks && origin.token >= 0 &&
         origin.token < limits.max_tokens && origin.k >= 0 && origin.k < limits.top_k;
}

}  // namespace distmoe::cuda
