// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend/expert_matrices.hpp"
#include "distmoe/routed_experts.hpp"

namespace distmoe {

class ContextImpl;

/// Checks the weights of a call, forward or backward, BF16 or prepared, and resolves every layout.
/// Throws invalid_argument with the tensor, what was given and what is legal.
ExpertMatrices resolve_weights(const ContextImpl& context, const ExpertWeights& weights);

}  // namespace distmoe
