// SPDX-License-Identifier: Apache-2.0
//
// The backward sequence, written once for every backend.
#include "runtime/backward.hpp"

#include <optional>

#include "core/check.hpp"
#include "runtime/backward_check.hpp"

namespace distmoe {
namespace {

/// Checks the arguments. A refusal is returned, not thrown: the peers must hear of it first.
BackwardCall check_at_the_door(const ContextImpl& context, std::int64_t call_index,
                               const BackwardArguments& arguments, std::optional<Error>& refusal) {
  try {
    return check_backward_call(context, call_index, arguments);
  } catch (const Error& error) {
    refusal = Error(error.code(),
                    concat("rank ", context.rank(), ", call ", call_index, ": ", error.what()));
  }
  BackwardCall refused;
  refused.index = call_index;
  refused.stream = arguments.options.stream;
  return refused;
}

}  // namespace

void run_backward(ContextImpl& context, const BackwardArguments& arguments) {
  context.run_call([&](Backend& backend, std::int64_t call_index) {
    std::optional<Error> refusal;
    const BackwardCall call = check_at_the_door(context, call_index, arguments, refusal);
    const auto next = [&](BackwardStep step) {
      if (arguments.observer != nullptr) (*arguments.observer)(step);
    };
    next(BackwardStep::kPublish);
    backend.publish_backward(call, refusal);
    context.note_call(call.index, call.num_tokens, call.ticket);
    next(BackwardStep::kCarve);
    backend.carve_backward(call);
    next(BackwardStep::kRestoreActivations);
    backend.restore_activations(call);
    next(BackwardStep::kDispatchGradH3);
    backend.dispatch_grad_h3(call);
    next(BackwardStep::kW2Dgrad);
    backend.w2_dgrad(call);
    next(BackwardStep::kW2Wgrad);
    backend.w2_wgrad(call);
    next(BackwardStep::kSwigluBackward);
    backend.swiglu_backward(call);
    next(BackwardStep::kW13Wgrad);
    backend.w13_wgrad(call);
    next(BackwardStep::kW13DgradScatter);
    backend.w13_dgrad_scatter(call);
    next(BackwardStep::kReduceGradients);
    backend.reduce_gradients(call);
    next(BackwardStep::kEnd);
    backend.rewind(*call.ticket);
    context.slots()->pop(*call.ticket);
  });
}

void routed_experts_backward(Context& context, SavedForward&& saved, const TensorView& dy_TD,
                             const ExpertWeights& weights, const RoutedGradients& gradients,
                             const CallOptions& options) {
  run_backward(context.impl(), {saved, dy_TD, weights, gradients, options});
  saved = {};
}

}  // namespace distmoe
