// SPDX-License-Identifier: Apache-2.0
//
// What calls get from Python, read while the GIL is held: TypeError and Error say which argument
// cannot be read.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "distmoe/routed_experts.hpp"
#include "distmoe/routed_experts_backward.hpp"
#include "prepared_argument.hpp"
#include "shared_context.hpp"
#include "tensor_argument.hpp"

namespace distmoe::python {

/// The weights of a call.
struct WeightArguments {
  WeightArgument w13, w2;
  TensorArgument bias13, bias2;

  WeightArguments(nanobind::handle w13, nanobind::handle w2, nanobind::handle bias13,
                  nanobind::handle bias2, std::uintptr_t stream)
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

  OptionArguments(nanobind::handle norm_object, nanobind::handle clip_counts,
                  nanobind::handle limit, std::uintptr_t stream);

  CallOptions options() const;
};

/// Everything of a forward that comes from Python.
struct ForwardArguments {
  TensorArgument x, ids, scores;
  WeightArguments weights;
  TensorArgument y;
  OptionArguments options;

  RoutedInput input() const { return {x.view(), ids.view(), scores.view()}; }
};

/// The arguments of a forward as Python gives them.
struct ForwardObjects {
  nanobind::handle x, ids, scores, w13, w2, y, bias13, bias2, norm, clip_counts, clip_limit;
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

/// Which of the weights' gradients are added to what their destinations hold: True for all, or a
/// collection of names.
class Accumulation {
 public:
  explicit Accumulation(nanobind::handle given);

  WeightGradient destination(std::string_view name, const TensorArgument& tensor) const;

 private:
  struct Name {
    std::string_view text;
    bool is_added = false;
  };

  void add(const std::string& name);

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

/// The SavedForward that Python gave; TypeError for anything else.
HeldForward* saved_of(nanobind::handle given);

}  // namespace distmoe::python
