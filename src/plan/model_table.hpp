// SPDX-License-Identifier: Apache-2.0
//
// Shapes of the routed experts of public models, from their published configurations.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace distmoe {

struct ModelShape {
  std::string_view name;
  std::int64_t hidden_dim;
  std::int64_t intermediate_dim;  // of one expert
  std::int64_t top_k;
  std::int64_t num_experts;
  std::int64_t num_moe_layers;
};

std::span<const ModelShape> model_table();

/// The model of that name; case does not matter, and a part that only one name has is enough.
/// Throws invalid_argument with the names there are, or those that the part fits.
const ModelShape& find_model(std::string_view name);

}  // namespace distmoe
