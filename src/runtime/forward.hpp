// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "distmoe/routed_experts.hpp"
#include "runtime/context_impl.hpp"

namespace distmoe {

/// What a caller of a forward brings.
struct ForwardArguments {
  const RoutedInput& input;
  const ExpertWeights& weights;
  const TensorView& y_TD;
  const CallOptions& options;
  bool saves;  ///< the call takes a place in the selected slot, which the caller registers
};

/// The forward sequence of one call.
void run_forward(ContextImpl& context, const ForwardArguments& arguments);

}  // namespace distmoe
