// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "distmoe/config.hpp"
#include "io/checkpoint.hpp"

namespace distmoe::tools {

/// An inference configuration for one layer of a checkpoint, which plans for the worst case of
/// `num_ranks` ranks with `max_tokens` tokens each, top_k experts a token.
inline Config layer_config(const LayerShape& shape, std::int64_t max_tokens, std::int64_t top_k,
                           int num_ranks) {
  Config config;
  config.max_tokens = std::max<std::int64_t>(1, max_tokens);
  config.hidden_dim = shape.hidden_dim;
  config.intermediate_dim = shape.intermediate_dim;
  config.top_k = top_k;
  config.num_experts = shape.num_experts;
  config.max_moe_layers_per_activation_slot = 1;
  config.device_scratch_capacity_factor = num_ranks;
  config.distinct_experts = false;
  config.activation = shape.activation;
  config.swiglu_alpha = shape.swiglu_alpha;
  config.swiglu_limit = shape.swiglu_limit;
  config.inference = true;
  return config;
}

}  // namespace distmoe::tools
