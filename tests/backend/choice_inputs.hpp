// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend/cuda/select/kernel_choice.hpp"

namespace distmoe::cuda {

/// Qwen3-30B-A3B on one H200.
inline ChoiceInputs qwen() {
  return {.hidden_dim = 2048,
          .intermediate_dim = 768,
          .top_k = 8,
          .num_experts = 128,
          .device_sms = 132};
}

}  // namespace distmoe::cuda
