// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "backend/backend.hpp"
#include "distmoe/routed_experts.hpp"
#include "runtime/weight_check.hpp"

namespace distmoe {

/// Checks the arguments of a forward call against the contract and resolves every layout. Throws
/// invalid_argument with the tensor, what was given and what is legal; touches nothing.
ForwardCall check_forward_call(const ContextImpl& context, std::int64_t call_index,
                               const RoutedInput& input, const ExpertWeights& weights,
                               const TensorView& y_TD, const CallOptions& options,
                               Values values = Values::kChecked);

/// What the backend is told of the options' norm, which was checked.
std::optional<NormCall> norm_call(const CallOptions& options);

}  // namespace distmoe
