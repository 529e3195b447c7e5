// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/kernels/sm90_bf16_wgrad.hpp"

namespace distmoe::cuda {

struct BiasGradientArgs {
  const CallFrame* frame = nullptr;
  const std::int32_t* expert_begin = nullptr;  ///< [L + 1]
  const std::uint64_t* grads = nullptr;        ///< on the device: where BF16 [R, width] is
  WeightGradient out{};                        ///< [L, width]
  std::int32_t num_experts = 0;                ///< L
  std::int32_t width = 0;
};

/// Loads the kernel on the current device; once, outside of captures, before any call.
cudaError_t prepare_bias_gradient();

/// out[e, i] (+)= the sum of grads over the expert's rows in FP32, one row after the other. Failed
/// calls and experts without rows as launch_wgrad.
cudaError_t launch_bias_gradient(const BiasGradientArgs& args, cudaStream_t stream);

}  // namespace distmoe::cuda
