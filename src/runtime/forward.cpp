// SPDX-License-Identifier: Apache-2.0
//
// The forward sequence, written once for every backend.
#include <optional>

#include "core/check.hpp"
#include "distmoe/routed_experts.hpp"
#include "runtime/call_check.hpp"
#include "runtime/context_impl.hpp"

namespace distmoe {
namespace {

/// Checks the arguments. A refusal is returned, not thrown: the peers must hear of it first.
ForwardCall check_at_the_door(const ContextImpl& context, std::int64_t call_index,
                              const RoutedInput& input, const ExpertWeights& weights,
                              const TensorView& y_TD, const CallOptions& options,
                              std::optional<Error>& refusal) {
  try {
    return check_forward_call(context, call_index, input, weights, y_TD, options);
  } catch (const Error& error) {
    refusal = Error(error.code(),
                    concat("rank ", context.rank(), ", call ", call_index, ": ", error.what()));
  }
  ForwardCall refused;
  refused.index = call_index;
  refused.stream = options.stream;
  return refused;
}

}  // namespace

void routed_experts(Context& context, const RoutedInput& input, const ExpertWeights& weights,
                    const TensorView& y_TD, const CallOptions& options) {
  ContextImpl& impl = context.impl();
  impl.run_call([&](Backend& backend, std::int64_t call_index) {
    std::optional<Error> refusal;
    const ForwardCall call =
        check_at_the_door(impl, call_index, input, weights, y_TD, options, refusal);
    backend.publish(call, refusal);
    backend.route(call);
    impl.note_routed(call_index, call.num_tokens);
    backend.dispatch_w13_swiglu(call);
    backend.w2_scatter(call);
    backend.combine(call);
  });
}

}  // namespace distmoe
