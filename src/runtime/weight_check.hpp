// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backend/expert_matrices.hpp"
#include "distmoe/routed_experts.hpp"

namespace distmoe {

class ContextImpl;

/// Whether what tensors hold is checked too, or their types, shapes and places alone: a compiler's
/// tensors have no memory.
enum class Values : std::uint8_t { kChecked, kIgnored };

/// Checks the weights of a call, forward or backward, BF16 or prepared, and resolves every layout.
/// Throws invalid_argument with the tensor, what was given and what is legal.
ExpertMatrices resolve_weights(const ContextImpl& context, const ExpertWeights& weights,
                               Values values = Values::kChecked);

}  // namespace distmoe
