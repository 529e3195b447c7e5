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
#include "distmoe/routed_experts.hpp"
#include "distmoe/routed_experts_backward.hpp"
#include "errors.hpp"
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
  double clip_limit;
  std::uintptr_t stream;

  OptionArguments(nb::handle norm_object, nb::handle clip_counts, double clip_limit,
                  std::uintptr_t stream)
      : gamma(
            "norm.gamma",
            norm_object.is_none() ? nb::object(nb::none()) : nb::object(norm_object.attr("gamma")),
            Access::kRead, stream, true),
        counts("clip_counts", clip_counts, Access::kWritten, stream, true),
        clip_limit(clip_limit),
        stream(stream) {
    if (norm_object.is_none()) return;
    norm = PostExpertNorm{.eps = nb::cast<double>(norm_object.attr("eps")),
                          .gamma_D = gamma.view(),
                          .gain_center = nb::cast<double>(norm_object.attr("gain_center")),
                          .uses_kahan = nb::cast<bool>(norm_object.attr("uses_kahan")),
                          .recomputes_rstd = nb::cast<bool>(norm_object.attr("recomputes_rstd"))};
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

/// Calls `body(context, arguments)` with what Python gave.
template <typename Body>
decltype(auto) run_forward(const ContextObject& context, const ForwardArguments& given,
                           const Body& body) {
  const RoutedInput input = given.input();
  const ExpertWeights weights = given.weights.views();
  const CallOptions options = given.options.options();
  return context.run(
      [&](Context& inner) { return body(inner, input, weights, given.y.view(), options); });
}

void forward(const ContextObject& context, nb::handle x, nb::handle ids, nb::handle scores,
             nb::handle w13, nb::handle w2, nb::handle y, nb::handle bias13, nb::handle bias2,
             nb::handle norm, nb::handle clip_counts, double clip_limit, std::uintptr_t stream) {
  const ForwardArguments given{{"x", x, Access::kRead, stream},
                               {"topk_ids", ids, Access::kRead, stream},
                               {"topk_scores", scores, Access::kRead, stream},
                               {w13, w2, bias13, bias2, stream},
                               {"y", y, Access::kWritten, stream},
                               {norm, clip_counts, clip_limit, stream}};
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
                                            nb::handle clip_counts, double clip_limit,
                                            std::uintptr_t stream) {
  const ForwardArguments given{{"x", x, Access::kRead, stream},
                               {"topk_ids", ids, Access::kRead, stream},
                               {"topk_scores", scores, Access::kRead, stream},
                               {w13, w2, bias13, bias2, stream},
                               {"y", y, Access::kWritten, stream},
                               {norm, clip_counts, clip_limit, stream}};
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

void backward(const ContextObject& context, HeldForward& saved, nb::handle dy, nb::handle w13,
              nb::handle w2, nb::handle bias13, nb::handle bias2, nb::handle grad_x,
              nb::handle grad_scores, nb::handle grad_w13, nb::handle grad_w2,
              nb::handle grad_bias13, nb::handle grad_bias2, nb::handle accumulate,
              std::uintptr_t stream) {
  const auto destination = [stream](const char* name, nb::handle tensor) {
    return TensorArgument(name, tensor, Access::kWritten, stream, true);
  };
  const TensorArgument dy_TD("dy", dy, Access::kRead, stream);
  const WeightArguments weights(w13, w2, bias13, bias2, stream);
  const TensorArgument to_x = destination("grad_x", grad_x);
  const TensorArgument to_scores = destination("grad_scores", grad_scores);
  const TensorArgument to_w13 = destination("grad_w13", grad_w13);
  const TensorArgument to_w2 = destination("grad_w2", grad_w2);
  const TensorArgument to_bias13 = destination("grad_bias13", grad_bias13);
  const TensorArgument to_bias2 = destination("grad_bias2", grad_bias2);
  const Accumulation added(accumulate);
  const RoutedGradients gradients{.grad_x_TD = to_x.view(),
                                  .grad_scores_TK = to_scores.view(),
                                  .grad_w13_L2FD = added.destination("w13", to_w13),
                                  .grad_w2_LDF = added.destination("w2", to_w2),
                                  .grad_bias13_L2F = added.destination("bias13", to_bias13),
                                  .grad_bias2_LD = added.destination("bias2", to_bias2)};
  const ExpertWeights views = weights.views();
  context.run([&](Context& inner) {
    routed_experts_backward(inner, std::move(saved.saved), dy_TD.view(), views, gradients,
                            {.stream = stream_of(stream)});
  });
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
  module.def("routed_experts_backward", &backward, "context"_a, "saved"_a, "dy"_a.none(),
             "w13"_a.none(), "w2"_a.none(), nb::kw_only(), "bias13"_a.none() = none,
             "bias2"_a.none() = none, "grad_x"_a.none() = none, "grad_scores"_a.none() = none,
             "grad_w13"_a.none() = none, "grad_w2"_a.none() = none, "grad_bias13"_a.none() = none,
             "grad_bias2"_a.none() = none, "accumulate"_a = false, "stream"_a = 0,
             "Writes the gradients that are given a place, from `dy`, the gradient of y. "
             "`accumulate`: True, or the names of the weights (w13, w2, bias13, bias2) whose "
             "gradients are added to what is there. Collective.");
}

}  // namespace distmoe::python
