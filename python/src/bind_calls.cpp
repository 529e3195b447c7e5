// SPDX-License-Identifier: Apache-2.0
//
// Forward, backward and their refusals. Tensors are read while the GIL is held
// (call_arguments.hpp); the call itself runs without it.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>

#include "bindings.hpp"
#include "call_arguments.hpp"
#include "context_object.hpp"
#include "distmoe/refusal.hpp"
#include "errors.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace distmoe::python {
namespace {

// --- what cannot be read is told to the peers, as what the library refuses is ---

enum class Direction : std::uint8_t { kForward, kBackward };

/// Takes this rank's part in the peers' call with `reason`, which is thrown.
[[noreturn]] void refuse(const ContextObject& context, Direction direction, const Error& reason,
                         std::uintptr_t stream) {
  context.shared->note_begun_call();
  context.run([&](Context& inner) {
    if (direction == Direction::kForward) refuse_routed_experts(inner, reason, stream_of(stream));
    refuse_routed_experts_backward(inner, reason, stream_of(stream));
  });
  throw Error(reason);
}

/// The same for an exception that is raised in its own words.
void tell(const ContextObject& context, Direction direction, const Error& reason,
          std::uintptr_t stream) {
  try {
    refuse(context, direction, reason, stream);
    // NOLINTNEXTLINE(bugprone-empty-catch)
  } catch (const Error&) {  // of a closed context or a lost peer: what is raised says more
  }
}

/// What `read` makes of the arguments of a call.
template <typename Read>
auto read_or_refuse(const ContextObject& context, Direction direction, std::uintptr_t stream,
                    const Read& read) {
  context.shared->note_begun_call();
  try {
    return read();
  } catch (const Error& error) {
    refuse(context, direction, error, stream);
  } catch (const nb::python_error& raised) {
    tell(context, direction, error_of_exception(raised.value()), stream);
    throw;
  } catch (const nb::builtin_exception& raised) {
    tell(context, direction, {ErrorCode::kInvalidArgument, concat("TypeError: ", raised.what())},
         stream);
    throw;
  }
}

/// Calls `body(context, arguments)` with what Python gave.
template <typename Body>
decltype(auto) run_forward(const ContextObject& context, const ForwardObjects& objects,
                           const Body& body) {
  const ForwardArguments given =
      read_or_refuse(context, Direction::kForward, objects.stream, [&] { return objects.read(); });
  const RoutedInput input = given.input();
  const ExpertWeights weights = given.weights.views();
  const CallOptions options = given.options.options();
  return context.run(
      [&](Context& inner) { return body(inner, input, weights, given.y.view(), options); });
}

void forward(const ContextObject& context, nb::handle x, nb::handle ids, nb::handle scores,
             nb::handle w13, nb::handle w2, nb::handle y, nb::handle bias13, nb::handle bias2,
             nb::handle norm, nb::handle clip_counts, nb::handle clip_limit,
             std::uintptr_t stream) {
  const ForwardObjects given{x,      ids,   scores, w13,         w2,         y,
                             bias13, bias2, norm,   clip_counts, clip_limit, stream};
  run_forward(context, given,
              [](Context& inner, const RoutedInput& input, const ExpertWeights& weights,
                 const TensorView& y_TD, const CallOptions& options) {
                routed_experts(inner, input, weights, y_TD, options);
              });
}

std::shared_ptr<HeldForward> saving_forward(const ContextObject& context, nb::handle x,
                                            nb::handle ids, nb::handle scores, nb::handle w13,
                                            nb::handle w2, nb::handle y, nb::handle bias13,
                                            nb::handle bias2, nb::handle norm,
                                            nb::handle clip_counts, nb::handle clip_limit,
                                            std::uintptr_t stream) {
  const ForwardObjects given{x,      ids,   scores, w13,         w2,         y,
                             bias13, bias2, norm,   clip_counts, clip_limit, stream};
  SavedForward saved =
      run_forward(context, given,
                  [](Context& inner, const RoutedInput& input, const ExpertWeights& weights,
                     const TensorView& y_TD, const CallOptions& options) {
                    return saving_routed_experts(inner, input, weights, y_TD, options);
                  });
  return std::make_shared<HeldForward>(std::move(saved), context.shared, stream_of(stream));
}

void backward(const ContextObject& context, nb::handle saved, nb::handle dy, nb::handle w13,
              nb::handle w2, nb::handle bias13, nb::handle bias2, nb::handle grad_x,
              nb::handle grad_scores, nb::handle grad_w13, nb::handle grad_w2,
              nb::handle grad_bias13, nb::handle grad_bias2, nb::handle accumulate,
              std::uintptr_t stream) {
  const auto destination = [stream](const char* name, nb::handle tensor) {
    return TensorArgument(name, tensor, Access::kWritten, stream, true);
  };
  const auto read = [&] {
    return BackwardArguments{.saved = saved_of(saved),
                             .dy = {"dy", dy, Access::kRead, stream},
                             .weights = {w13, w2, bias13, bias2, stream},
                             .to_x = destination("grad_x", grad_x),
                             .to_scores = destination("grad_scores", grad_scores),
                             .to_w13 = destination("grad_w13", grad_w13),
                             .to_w2 = destination("grad_w2", grad_w2),
                             .to_bias13 = destination("grad_bias13", grad_bias13),
                             .to_bias2 = destination("grad_bias2", grad_bias2),
                             .added = Accumulation(accumulate)};
  };
  const BackwardArguments given = read_or_refuse(context, Direction::kBackward, stream, read);
  const ExpertWeights weights = given.weights.views();
  const RoutedGradients gradients = given.gradients();
  context.run([&](Context& inner) {
    routed_experts_backward(inner, std::move(given.saved->saved), given.dy.view(), weights,
                            gradients, {.stream = stream_of(stream)});
  });
}

void check_forward(const ContextObject& context, nb::handle x, nb::handle ids, nb::handle scores,
                   nb::handle w13, nb::handle w2, nb::handle y, nb::handle bias13, nb::handle bias2,
                   nb::handle norm, nb::handle clip_counts, nb::handle clip_limit) {
  const ForwardArguments given =
      ForwardObjects{x, ids, scores, w13, w2, y, bias13, bias2, norm, clip_counts, clip_limit, 0}
          .read();
  RoutedInput input = given.input();
  ExpertWeights weights = given.weights.views();
  TensorView y_TD = given.y.view();
  CallOptions options = given.options.options();
  // What has no memory is taken for what has some.
  alignas(16) static std::byte somewhere[16];
  for (TensorView* view :
       {&input.x_TD, &input.topk_ids_TK, &input.topk_scores_TK, &weights.w13_L2FD, &weights.w2_LDF,
        &weights.bias13_L2F, &weights.bias2_LD, &weights.prepared_w13.codes,
        &weights.prepared_w13.scales, &weights.prepared_w13.global_scales,
        &weights.prepared_w2.codes, &weights.prepared_w2.scales, &weights.prepared_w2.global_scales,
        &y_TD, &options.clip_statistics.counts_3}) {
    if (view->data == nullptr) view->data = somewhere;
  }
  if (options.norm && options.norm->gamma_D.data == nullptr) {
    options.norm->gamma_D.data = somewhere;
  }
  check_routed_experts(context.shared->context(), input, weights, y_TD, options);
}

void bind_refusals(nb::module_& module) {
  module.def(
      "refuse_routed_experts",
      [](const ContextObject& context, nb::handle reason, std::uintptr_t stream) {
        refuse(context, Direction::kForward, error_of_exception(reason), stream);
      },
      "context"_a, "reason"_a, nb::kw_only(), "stream"_a = 0,
      "Takes this rank's part in the forward that its peers make, where it has no arguments for "
      "one, for the exception `reason`: every rank raises, the next call works.");
  module.def(
      "refuse_routed_experts_backward",
      [](const ContextObject& context, nb::handle reason, std::uintptr_t stream) {
        refuse(context, Direction::kBackward, error_of_exception(reason), stream);
      },
      "context"_a, "reason"_a, nb::kw_only(), "stream"_a = 0, "The same in place of a backward.");
  module.def(
      "agree",
      [](const ContextObject& context, nb::handle failure) {
        std::optional<Error> error;
        if (!failure.is_none()) error = error_of_exception(failure);
        context.run([&](Context& inner) { agree(inner, error); });
      },
      "context"_a, "failure"_a.none() = nb::none(),
      "Between calls: raises on every rank where any gives an exception. Collective.");
}

}  // namespace

void bind_calls(nb::module_& module) {
  const auto none = nb::none();
  module.def("routed_experts", &forward, "context"_a, "x"_a.none(), "topk_ids"_a.none(),
             "topk_scores"_a.none(), "w13"_a.none(), "w2"_a.none(), "y"_a.none(), nb::kw_only(),
             "bias13"_a.none() = none, "bias2"_a.none() = none, "norm"_a.none() = none,
             "clip_counts"_a.none() = none, "clip_limit"_a = 7.0, "stream"_a = 0,
             "Writes into `y` (BF16 [T, D]) what the experts that a token names answer, weighted "
             "by the scores and summed in the order of k. Collective.");
  module.def(
      "saving_routed_experts", &saving_forward, "context"_a, "x"_a.none(), "topk_ids"_a.none(),
      "topk_scores"_a.none(), "w13"_a.none(), "w2"_a.none(), "y"_a.none(), nb::kw_only(),
      "bias13"_a.none() = none, "bias2"_a.none() = none, "norm"_a.none() = none,
      "clip_counts"_a.none() = none, "clip_limit"_a = 7.0, "stream"_a = 0,
      "The same forward with the same bits, which keeps in the selected activation slot what "
      "its backward needs.");
  module.def("routed_experts_backward", &backward, "context"_a, "saved"_a.none(), "dy"_a.none(),
             "w13"_a.none(), "w2"_a.none(), nb::kw_only(), "bias13"_a.none() = none,
             "bias2"_a.none() = none, "grad_x"_a.none() = none, "grad_scores"_a.none() = none,
             "grad_w13"_a.none() = none, "grad_w2"_a.none() = none, "grad_bias13"_a.none() = none,
             "grad_bias2"_a.none() = none, "accumulate"_a = false, "stream"_a = 0,
             "Writes the gradients that are given a place, from `dy`, the gradient of y. "
             "`accumulate`: True, or the names of the weights (w13, w2, bias13, bias2) whose "
             "gradients are added to what is there. Collective.");
  module.def("check_routed_experts", &check_forward, "context"_a, "x"_a.none(), "topk_ids"_a.none(),
             "topk_scores"_a.none(), "w13"_a.none(), "w2"_a.none(), "y"_a.none(), nb::kw_only(),
             "bias13"_a.none() = none, "bias2"_a.none() = none, "norm"_a.none() = none,
             "clip_counts"_a.none() = none, "clip_limit"_a = 7.0,
             "Raises what routed_experts refuses of types, shapes, strides and devices, without a "
             "call; tensors may be TensorShapes.");
  bind_refusals(module);
}

}  // namespace distmoe::python
