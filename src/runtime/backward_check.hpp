// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend/backend.hpp"
#include "distmoe/routed_experts_backward.hpp"

namespace distmoe {

/// What a caller of a backward brings.
struct BackwardArguments {
  const SavedForward& saved;
  const TensorView& dy_TD;
  const ExpertWeights& weights;
  const RoutedGradients& gradients;
  const CallOptions& options;
};

/// Checks the arguments of a backward call against the contract, every destination before any is
/// written. Throws invalid_argument with the tensor, what was given and what is legal; touches
/// nothing.
BackwardCall check_backward_call(const ContextImpl& context, std::int64_t call_index,
                                 const BackwardArguments& arguments);

}  // namespace distmoe
