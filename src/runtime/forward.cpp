// SPDX-License-Identifier: Apache-2.0
//
// The forward sequence, written once for every backend.
#include "runtime/forward.hpp"

#include <memory>
#include <optional>
#include <utility>

#include "core/check.hpp"
#include "runtime/call_check.hpp"
#include "runtime/door.hpp"
#include "runtime/saved_forward_impl.hpp"
#include "runtime/step_marks.hpp"

namespace distmoe {
namespace {

/// The place that a saving call takes.
SlotTicket check_slot(const ContextImpl& context, const CallOptions& options) {
  const Config& config = context.config();
  DISTMOE_CHECK(!options.norm || config.activation_policy == ActivationPolicy::kFull,
                kInvalidArgument,
                "the backward of a post-expert RMSNorm needs the results of the routes: "
                "activation_policy lean keeps none, full does");
  DISTMOE_CHECK(config.combine == Combine::kPerRoute ||
                    config.activation_policy == ActivationPolicy::kLean || config.inference,
                kUnsupported,
                "combine per_rank sends sums, so that activation_policy full has no results of "
                "routes to keep; activation_policy lean does without them");
  return context.slots()->next();
}

ForwardCall check_forward(const ContextImpl& context, std::int64_t call_index,
                          const ForwardArguments& arguments) {
  if (arguments.refusal != nullptr) throw Error(*arguments.refusal);
  ForwardCall call = check_forward_call(context, call_index, arguments.input, arguments.weights,
                                        arguments.y_TD, arguments.options);
  call.saves = arguments.saved != nullptr;
  call.exchanges_rows = arguments.exchanges_rows;
  if (call.saves) call.ticket = check_slot(context, arguments.options);
  return call;
}

SavedShape saved_shape(const ForwardArguments& arguments) {
  return {.num_tokens = arguments.input.x_TD.shape[0],
          .score_dtype = arguments.input.topk_scores_TK.dtype,
          .has_bias13 = arguments.weights.bias13_L2F.is_given(),
          .has_bias2 = arguments.weights.bias2_LD.is_given(),
          .norm = norm_call(arguments.options)};
}

}  // namespace

const char* to_string(ForwardStep step) noexcept {
  constexpr const char* kNames[] = {"publish",    "route",   "carve", "dispatch_w13_swiglu",
                                    "w2_scatter", "combine", "end"};
  return kNames[static_cast<int>(step)];
}

void run_forward(ContextImpl& context, const ForwardArguments& arguments) {
  context.run_call([&](Backend& backend, std::int64_t call_index) {
    if (arguments.saved != nullptr) *arguments.saved = std::make_unique<SavedForwardImpl>();
    std::optional<Error> refusal;
    ForwardCall refused;
    refused.index = call_index;
    refused.saves = arguments.saved != nullptr;
    const ForwardCall call = check_at_the_door(
        context, backend, refused, arguments.options.stream,
        [&] { return check_forward(context, call_index, arguments); }, refusal);
    StepMarks<ForwardStep> next(arguments.observer);
    next(ForwardStep::kPublish);
    backend.publish(call, refusal);
    next(ForwardStep::kRoute);
    backend.route(call);
    context.note_call(call.index, call.num_tokens, call.ticket);
    next(ForwardStep::kCarve);
    backend.carve(call);
    next(ForwardStep::kDispatchW13Swiglu);
    call.exchanges_rows ? backend.dispatch_rows(call) : backend.dispatch_w13_swiglu(call);
    next(ForwardStep::kW2Scatter);
    call.exchanges_rows ? backend.return_rows(call) : backend.w2_scatter(call);
    next(ForwardStep::kCombine);
    backend.combine(call);
    if (call.saves) {
      (*arguments.saved)->set(context.slots(), context.slots()->push(), saved_shape(arguments));
    }
    next(ForwardStep::kEnd);
  });
}

void routed_experts(Context& context, const RoutedInput& input, const ExpertWeights& weights,
                    const TensorView& y_TD, const CallOptions& options) {
  run_forward(context.impl(), {input, weights, y_TD, options});
}

SavedForward run_saving_forward(ContextImpl& context, ForwardArguments arguments) {
  std::unique_ptr<SavedForwardImpl> saved;
  arguments.saved = &saved;
  run_forward(context, arguments);
  return SavedForward(std::move(saved));
}

SavedForward saving_routed_experts(Context& context, const RoutedInput& input,
                                   const ExpertWeights& weights, const TensorView& y_TD,
                                   const CallOptions& options) {
  return run_saving_forward(context.impl(), {input, weights, y_TD, options});
}

}  // namespace distmoe
