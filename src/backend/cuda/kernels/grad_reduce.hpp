// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/kernels/call_state.hpp"
#include "backend/cuda/training_frame.hpp"

namespace distmoe::cuda {

struct GradReduceArgs {
  CallState* state = nullptr;
  const CallFrame* frame = nullptr;
  const TrainingFrame* training = nullptr;
  std::uint64_t route_grads = 0;      ///< BF16 [T, K, D]
  const std::int32_t* ids = nullptr;  ///< [T, K] of the forward
  /// [T, K] of a layer that was computed again, or has a norm.
  const float* score_grads = nullptr;
  std::uint64_t dy = 0;  ///< BF16 [T, D]
  std::int64_t dy_stride_bytes = 0;
  std::uint64_t grad_x = 0;  ///< BF16 [T, D]; 0: not asked for
  std::int64_t grad_x_stride_bytes = 0;
  void* grad_scores = nullptr;  ///< [T, K]; null: not asked for
  std::int32_t grad_scores_are_bf16 = 0;
  std::int32_t is_normed = 0;
  std::int32_t num_tokens = 0;
  std::int32_t top_k = 0;
  std::int32_t hidden_dim = 0;  ///< a multiple of 8
};

/// Loads the kernels on the current device; once, outside of captures, before any call.
cudaError_t prepare_grad_reduce();

/// grad_x[t] = bf16(sum_k fp32(route_grads[t, k])), k in order; grad_scores[t, k] = sum_d h3 dy, of
/// h3 that the owner kept or as the rank of the expert found it; 0 for a disabled route. Of a
/// failed call both become NaN, and its fault the state's first one where none is kept yet.
cudaError_t launch_grad_reduce(const GradReduceArgs& args, cudaStream_t stream);

}  // namespace distmoe::cuda
