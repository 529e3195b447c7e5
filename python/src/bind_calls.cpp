// SPDX-License-Identifier: Apache-2.0
//
// Forward and backward. Tensors are read while the GIL is held; the call itself runs without it.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <string_view>

#include "bindings.hpp"
#include "context_object.hpp"
#include "distmoe/refusal.hpp"
#include "distmoe/routed_experts.hpp"
#include "distmoe/routed_experts_backward.hpp"
#include "errors.hpp"
#include "object_fields.hpp"
#include "prepared_argument.hpp"
#include "tensor_argument.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace distmoe::python {
namespace {

/// The weights of a call.
struct WeightArguments {
  WeightArgument w13, w2;
  TensorArgument bias13, bias2;

  WeightArguments(nb::handle w13, nb::handle w2, nb::handle bias13, nb::handle bias2,
                  std::uintptr_t stream)
      : w13("w13", w13, stream),
        w2("w2", w2, stream),
        bias13("bias13", bias13, Access::kRead, stream, true),
        bias2("bias2", bias2, Access::kRead, stream, true) {}

  ExpertWeights views() const {
    return {.w13_L2FD = w13.view(),
            .w2_LDF = w2.view(),
            .bias13_L2F = bias13.view(),
            .bias2_LD = bias2.view(),
            .prepared_w13 = w13.prepared(),
            .prepared_w2 = w2.prepared()};
  }
};

/// A forward's options: a distmoe.PostExpertNorm or None, and the counts of clipped elements.
struct OptionArguments {
  std::optional<PostExpertNorm> norm;
  TensorArgument gamma, counts;
  double clip_limit = 0;
  std::uintptr_t stream;

  OptionArguments(nb::handle norm_object, nb::handle clip_counts, nb::handle limit,
                  std::uintptr_t stream)
      : gamma("norm.gamma", gamma_of(norm_object), Access::kRead, stream, true),
        counts("clip_counts", clip_counts, Access::kWritten, stream, true),
        stream(stream) {
    Fields::read_value("clip_limit", limit, clip_limit);
    if (norm_object.is_none()) return;
    const Fields fields(norm_object, "norm.");
    norm.emplace();
    norm->gamma_D = gamma.view();
    fields.read("eps", norm->eps);
    fields.read("gain_center", norm->gain_center);
    fields.read("uses_kahan", norm->uses_kahan);
    fields.read("recomputes_rstd", norm->recomputes_rstd);
  }

  static nb::object gamma_of(nb::handle norm_object) {
    if (norm_object.is_none()) return nb::none();
    const nb::object expected = nb::module_::import_("distmoe.norm").attr("PostExpertNorm");
    if (!nb::isinstance(norm_object, expected)) {
      throw_type_error(concat("norm is ", nb::type_name(norm_object.type()).c_str(),
                              "; it must be a PostExpertNorm or None"));
    }
    return norm_object.attr("gamma");
  }

  CallOptions options() const {
    return {.stream = stream_of(stream),
            .norm = norm,
            .clip_statistics = {.counts_3 = counts.view(), .limit = clip_limit}};
  }
};

/// Everything of a forward that comes from Python.
struct ForwardArguments {
  TensorArgument x, ids, scores;
  WeightArguments weights;
  TensorArgument y;
  OptionArguments options;

  RoutedInput input() const { return {x.view(), ids.view(), scores.view()}; }
};

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

/// The arguments of a forward as Python gives them.
struct ForwardObjects {
  nb::handle x, ids, scores, w13, w2, y, bias13, bias2, norm, clip_counts, clip_limit;
  std::uintptr_t stream;

  ForwardArguments read() const {
    return {{"x", x, Access::kRead, stream},
            {"topk_ids", ids, Access::kRead, stream},
            {"topk_scores", scores, Access::kRead, stream},
            {w13, w2, bias13, bias2, stream},
            {"y", y, Access::kWritten, stream},
            {norm, clip_counts, clip_limit, stream}};
  }
};

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

/// Which of the weights' gradients are added to what their destinations hold: True for all, or a
/// collection of names.
class Accumulation {
 public:
  explicit Accumulation(nb::handle given) {
    if (PyBool_Check(given.ptr())) {
      for (Name& name : names_) name.is_added = nb::cast<bool>(given);
      return;
    }
    for (const nb::handle item : given) add(nb::cast<std::string>(item));
  }

  WeightGradient destination(std::string_view name, const TensorArgument& tensor) const {
    for (const Name& known : names_) {
      if (known.text == name) return {tensor.view(), known.is_added};
    }
    return {tensor.view(), false};
  }

 private:
  struct Name {
    std::string_view text;
    bool is_added = false;
  };

  void add(const std::string& name) {
    for (Name& known : names_) {
      if (known.text != name) continue;
      known.is_added = true;
      return;
    }
    throw Error(ErrorCode::kInvalidArgument,
                concat("accumulate names '", name, "'; legal are w13, w2, bias13, bias2"));
  }

  Name names_[4] = {{"w13"}, {"w2"}, {"bias13"}, {"bias2"}};
};

/// Everything of a backward that comes from Python.
struct BackwardArguments {
  HeldForward* saved = nullptr;
  TensorArgument dy;
  WeightArguments weights;
  TensorArgument to_x, to_scores, to_w13, to_w2, to_bias13, to_bias2;
  Accumulation added;

  RoutedGradients gradients() const {
    return {.grad_x_TD = to_x.view(),
            .grad_scores_TK = to_scores.view(),
            .grad_w13_L2FD = added.destination("w13", to_w13),
            .grad_w2_LDF = added.destination("w2", to_w2),
            .grad_bias13_L2F = added.destination("bias13", to_bias13),
            .grad_bias2_LD = added.destination("bias2", to_bias2)};
  }
};

HeldForward* saved_of(nb::handle given) {
  HeldForward* saved = nullptr;
  if (nb::try_cast(given, saved) && saved != nullptr) return saved;
  throw_type_error(concat("saved is ", nb::type_name(given.type()).c_str(),
                          "; it must be the SavedForward of a saving_routed_experts"));
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
