// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "distmoe/routed_experts_backward.hpp"
#include "runtime/context_impl.hpp"

namespace distmoe {

/// What a caller of a backward brings.
struct BackwardArguments {
  const SavedForward& saved;
  const TensorView& dy_TD;
  const ExpertWeights& weights;
  const RoutedGradients& gradients;
  const CallOptions& options;
};

/// The backward sequence of one call; on success the slot no longer keeps `saved`.
void run_backward(ContextImpl& context, const BackwardArguments& arguments);

}  // namespace distmoe
