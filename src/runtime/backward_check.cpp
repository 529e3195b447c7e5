// SPDX-License-Identifier: Apache-2.0
#include "runtime/backward_check.hpp"

#include "core/check.hpp"
#include "plan/expert_partition.hpp"
#include "runtime/context_impl.hpp"
#include "runtime/overlap_check.hpp"
#include "runtime/saved_forward_impl.hpp"
#include "runtime/tensor_check.hpp"
#include "runtime/weight_check.hpp"

namespace distmoe {
namespace {

GradientDestination resolve_gradient(const ContextImpl& context, const char* name,
                                     const WeightGradient& gradient,
                                     std::initializer_list<std::int64_t> shape) {
  const TensorView& tensor = gradient.tensor;
  if (!tensor.is_given()) return {};
  check_shape(name, tensor, shape);
  check_dtype(name, tensor, DType::kBF16, DType::kF32);
  const DType configured = weight_gradient_dtype(context.config());
  DISTMOE_CHECK(
      context.config().wgrad_dtype == WgradDType::kSameAsWeight || tensor.dtype == configured,
      kInvalidArgument, name, " must be ", to_string(configured),
      " as Config::wgrad_dtype says, got ", tensor.describe());
  check_memory(context, name, tensor);
  check_contiguous(name, tensor);
  check_vector_rows(context, name, tensor);
  return {.data = tensor.data, .dtype = tensor.dtype, .accumulates = gradient.accumulates};
}

GradientDestination resolve_grad_w13(const ContextImpl& context, const WeightGradient& gradient,
                                     std::int64_t num_local) {
  const Config& config = context.config();
  if (gradient.tensor.rank != 4) {
    return resolve_gradient(context, "grad_w13", gradient,
                            {num_local, 2 * config.intermediate_dim, config.hidden_dim});
  }
  DISTMOE_CHECK(config.gate_up_layout == GateUpLayout::kConcatenated, kInvalidArgument,
                "grad_w13 of shape [L, 2, F, D] names its halves; that of interleaved weights is "
                "[L, 2F, D]");
  return resolve_gradient(context, "grad_w13", gradient,
                          {num_local, 2, config.intermediate_dim, config.hidden_dim});
}

GradientDestination resolve_grad_bias(const ContextImpl& context, const char* name,
                                      const WeightGradient& gradient, bool has_bias,
                                      std::int64_t num_local, std::int64_t width) {
  DISTMOE_CHECK(!gradient.tensor.is_given() || has_bias, kInvalidArgument, name,
                " is asked for, but the call has no such bias");
  return resolve_gradient(context, name, gradient, {num_local, width});
}

/// Two destinations in one place would be a race, and what is written over an argument is read
/// again.
void check_places(const BackwardArguments& arguments) {
  const RoutedGradients& gradients = arguments.gradients;
  const ExpertWeights& weights = arguments.weights;
  check_apart({{"dy", &arguments.dy_TD, Access::kRead},
               {"grad_x", &gradients.grad_x_TD, Access::kWritten},
               {"grad_scores", &gradients.grad_scores_TK, Access::kWritten},
               {"grad_w13", &gradients.grad_w13_L2FD.tensor, Access::kWritten},
               {"grad_w2", &gradients.grad_w2_LDF.tensor, Access::kWritten},
               {"grad_bias13", &gradients.grad_bias13_L2F.tensor, Access::kWritten},
               {"grad_bias2", &gradients.grad_bias2_LD.tensor, Access::kWritten},
               {"w13", &weights.w13_L2FD, Access::kRead},
               {"w2", &weights.w2_LDF, Access::kRead},
               {"codes of w13", &weights.prepared_w13.codes, Access::kRead},
               {"scales of w13", &weights.prepared_w13.scales, Access::kRead},
               {"codes of w2", &weights.prepared_w2.codes, Access::kRead},
               {"scales of w2", &weights.prepared_w2.scales, Access::kRead},
               {"bias13", &weights.bias13_L2F, Access::kRead},
               {"bias2", &weights.bias2_LD, Access::kRead}});
}

void check_grad_scores(const ContextImpl& context, const TensorView& grad_scores,
                       const SavedShape& forward) {
  if (!grad_scores.is_given()) return;
  check_shape("grad_scores", grad_scores, {forward.num_tokens, context.config().top_k});
  check_dtype("grad_scores", grad_scores, forward.score_dtype, forward.score_dtype);
  check_memory(context, "grad_scores", grad_scores);
  check_contiguous("grad_scores", grad_scores);
}

/// A layer that is computed again must be the forward's.
void check_bias(const char* name, bool has_bias, bool had_bias) {
  DISTMOE_CHECK(has_bias == had_bias, kInvalidArgument, name, " is ", has_bias ? "" : "not ",
                "given, but the forward had ", had_bias ? "one" : "none",
                "; a backward takes the weights of its forward");
}

}  // namespace

DType weight_gradient_dtype(const Config& config) noexcept {
  return config.wgrad_dtype == WgradDType::kF32 ? DType::kF32 : DType::kBF16;
}

BackwardCall check_backward_call(const ContextImpl& context, std::int64_t call_index,
                                 const BackwardArguments& arguments) {
  if (arguments.refusal != nullptr) throw Error(*arguments.refusal);
  const SavedForwardImpl& saved = context.check_backward(arguments.saved);
  const SavedShape& forward = saved.shape();
  const RoutedGradients& gradients = arguments.gradients;
  const Config& config = context.config();
  const std::int64_t num_local =
      num_local_experts(config.num_experts, context.size(), context.rank());
  check_input_rows(context, "dy", arguments.dy_TD, forward.num_tokens);
  BackwardCall call{
      .index = call_index,
      .num_tokens = forward.num_tokens,
      .ticket = saved.ticket(),
      .dy_TD = arguments.dy_TD,
      .experts = resolve_weights(context, arguments.weights),
      .norm = forward.norm,
      .grad_x_TD = gradients.grad_x_TD,
      .grad_scores_TK = gradients.grad_scores_TK,
      .grad_w13_L2FD = resolve_grad_w13(context, gradients.grad_w13_L2FD, num_local),
      .grad_w2_LDF = resolve_gradient(context, "grad_w2", gradients.grad_w2_LDF,
                                      {num_local, config.hidden_dim, config.intermediate_dim}),
      .grad_bias13_L2F = {},
      .grad_bias2_LD = {},
      .stream = arguments.options.stream};
  if (call.grad_x_TD.is_given()) {
    check_output_rows(context, "grad_x", call.grad_x_TD, forward.num_tokens);
  }
  check_grad_scores(context, call.grad_scores_TK, forward);
  call.grad_bias13_L2F = resolve_grad_bias(context, "grad_bias13", gradients.grad_bias13_L2F,
                                           arguments.weights.bias13_L2F.is_given(), num_local,
                                           2 * config.intermediate_dim);
  call.grad_bias2_LD =
      resolve_grad_bias(context, "grad_bias2", gradients.grad_bias2_LD,
                        arguments.weights.bias2_LD.is_given(), num_local, config.hidden_dim);
  check_bias("bias13", arguments.weights.bias13_L2F.is_given(), forward.has_bias13);
  check_bias("bias2", arguments.weights.bias2_LD.is_given(), forward.has_bias2);
  check_places(arguments);
  return call;
}

}  // namespace distmoe
