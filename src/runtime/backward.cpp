// SPDX-License-Identifier: Apache-2.0
//
// The backward sequence, written once for every backend.
#include "runtime/backward.hpp"

#include <optional>

#include "runtime/backward_check.hpp"
#include "runtime/door.hpp"
#include "runtime/saved_forward_impl.hpp"
#include "runtime/step_marks.hpp"

namespace distmoe {

const char* to_string(BackwardStep step) noexcept {
  constexpr const char* kNames[] = {"publish_backward",
                                    "carve_backward",
                                    "restore_activations",
                                    "dispatch_grad_h3",
                                    "w2_dgrad",
                                    "w2_wgrad",
                                    "swiglu_backward",
                                    "w13_wgrad",
                                    "w13_dgrad_scatter",
                                    "reduce_gradients",
                                    "end"};
  return kNames[static_cast<int>(step)];
}

void run_backward(ContextImpl& context, const BackwardArguments& arguments) {
  context.run_call([&](Backend& backend, std::int64_t call_index) {
    std::optional<Error> refusal;
    BackwardCall refused;
    refused.index = call_index;
    const BackwardCall call = check_at_the_door(
        context, backend, refused, arguments.options.stream,
        [&] { return check_backward_call(context, call_index, arguments); }, refusal);
    StepMarks<BackwardStep> next(arguments.observer);
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
    backend.rewind(*call.ticket);
    context.slots()->pop(*call.ticket);
    arguments.saved.impl()->finish();
    next(BackwardStep::kEnd);
  });
}

void routed_experts_backward(Context& context, SavedForward&& saved, const TensorView& dy_TD,
                             const ExpertWeights& weights, const RoutedGradients& gradients,
                             const CallOptions& options) {
  run_backward(context.impl(), {saved, dy_TD, weights, gradients, options});
  saved = {};
}

}  // namespace distmoe
