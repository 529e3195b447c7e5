// SPDX-License-Identifier: Apache-2.0
#include "runtime/backward_check.hpp"

#include <cstddef>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "plan/expert_partition.hpp"
#include "runtime/call_check.hpp"
#include "runtime/context_impl.hpp"
#include "runtime/saved_forward_impl.hpp"
#include "runtime/tensor_check.hpp"

namespace distmoe {
namespace {

GradientDestination resolve_gradient(const ContextImpl& context, const char* name,
                                     const WeightGradient& gradient,
                                     std::initializer_list<std::int64_t> shape) {
  const TensorView& tensor = gradient.tensor;
  if (!tensor.is_given()) return {};
  check_shape(name, tensor, shape);
  check_dtype(name, tensor, DType::kBF16, DType::kF32);
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

/// The bytes from the first to the last element of what a call writes.
struct Extent {
  const char* name;
  const std::byte* begin;
  const std::byte* end;
};

void add_extent(std::vector<Extent>& extents, const char* name, const TensorView& tensor) {
  if (tensor.num_elements() == 0) return;
  std::int64_t first = 0;
  std::int64_t last = 0;
  for (int dim = 0; dim < tensor.rank; ++dim) {
    const std::int64_t reach = (tensor.shape[dim] - 1) * tensor.strides[dim];
    (reach < 0 ? first : last) += reach;
  }
  const auto element = static_cast<std::int64_t>(size_of(tensor.dtype));
  const auto* data = static_cast<const std::byte*>(tensor.data);
  extents.push_back({name, data + first * element, data + (last + 1) * element});
}

void check_apart(const Extent& a, const Extent& b) {
  DISTMOE_CHECK(a.end <= b.begin || b.end <= a.begin, kInvalidArgument, a.name, " and ", b.name,
                " overlap in memory");
}

/// What lies between strided rows may be another's.
void check_rows_apart(const char* name, const TensorView& rows_TD, const Extent& other) {
  std::vector<Extent> rows;
  add_extent(rows, name, rows_TD);
  if (rows.empty() || rows[0].end <= other.begin || other.end <= rows[0].begin) return;
  const auto element = static_cast<std::int64_t>(size_of(rows_TD.dtype));
  const auto* row = static_cast<const std::byte*>(rows_TD.data);
  for (std::int64_t token = 0; token < rows_TD.shape[0]; ++token) {
    check_apart({name, row, row + rows_TD.shape[1] * element}, other);
    row += rows_TD.strides[0] * element;
  }
}

/// Two destinations in one place would be a race, and what is written over an argument is read
/// again.
void check_apart(const BackwardArguments& arguments) {
  const RoutedGradients& gradients = arguments.gradients;
  std::vector<Extent> destinations;
  add_extent(destinations, "grad_scores", gradients.grad_scores_TK);
  add_extent(destinations, "grad_w13", gradients.grad_w13_L2FD.tensor);
  add_extent(destinations, "grad_w2", gradients.grad_w2_LDF.tensor);
  add_extent(destinations, "grad_bias13", gradients.grad_bias13_L2F.tensor);
  add_extent(destinations, "grad_bias2", gradients.grad_bias2_LD.tensor);
  for (std::size_t i = 0; i < destinations.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) check_apart(destinations[j], destinations[i]);
    check_rows_apart("grad_x", gradients.grad_x_TD, destinations[i]);
    check_rows_apart("dy", arguments.dy_TD, destinations[i]);
  }
  const ExpertWeights& weights = arguments.weights;
  std::vector<Extent> read;
  for (const auto& [name, tensor] :
       {std::pair("w13", &weights.w13_L2FD), std::pair("w2", &weights.w2_LDF),
        std::pair("bias13", &weights.bias13_L2F), std::pair("bias2", &weights.bias2_LD)}) {
    if (tensor->is_contiguous()) add_extent(read, name, *tensor);
  }
  for (const Extent& argument : read) {
    for (const Extent& destination : destinations) check_apart(destination, argument);
    check_rows_apart("grad_x", gradients.grad_x_TD, argument);
  }
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

BackwardCall check_backward_call(const ContextImpl& context, std::int64_t call_index,
                                 const BackwardArguments& arguments) {
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
  check_apart(arguments);
  return call;
}

}  // namespace distmoe
