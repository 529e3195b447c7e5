// SPDX-License-Identifier: Apache-2.0
//
// Shapes and types of prepared weights: what is made, and what a call accepts.
#pragma once

#include <cstdint>

#include "distmoe/prepared_weight.hpp"

namespace distmoe {

/// The largest byte that is a scale of a weight; above lies NaN, or what the format has no use for.
std::uint8_t max_scale_byte(Precision format);

/// The arrays of a weight [L, N, K], without memory. Throws invalid_argument for what the format
/// cannot hold.
PreparedWeightView prepared_layout(const BlockScaledConfig& config, std::int64_t num_experts,
                                   std::int64_t num_rows, std::int64_t num_columns);

/// Throws invalid_argument, with `name`, unless the arrays of `weight` have the types, shapes and
/// strides of a weight [L, N, K] of its config, at addresses that fit them.
void check_prepared_layout(const char* name, const PreparedWeightView& weight,
                           std::int64_t num_experts, std::int64_t num_rows,
                           std::int64_t num_columns);

/// Throws invalid_argument for a global scale, in host memory, that is not finite and positive.
void check_global_scales(const char* name, const PreparedWeightView& weight);

/// Throws invalid_argument for a block scale, in host memory, that is NaN or that the format does
/// not have in weights. check_prepared_layout() has been passed.
void check_block_scales(const char* name, const PreparedWeightView& weight);

}  // namespace distmoe
