// SPDX-License-Identifier: Apache-2.0
#include "runtime/call_check.hpp"

#include <cmath>
#include <cstdint>

#include "core/check.hpp"
#include "plan/expert_partition.hpp"
#include "runtime/context_impl.hpp"
#include "runtime/tensor_check.hpp"

namespace distmoe {
namespace {

void check_activations(const ContextImpl& context, const RoutedInput& input) {
  const Config& config = context.config();
  const TensorView& x = input.x_TD;
  DISTMOE_CHECK(x.rank == 2 && x.shape[1] == config.hidden_dim, kInvalidArgument,
                "x must have shape [T, ", config.hidden_dim, "], got ", x.describe());
  const std::int64_t tokens = x.shape[0];
  DISTMOE_CHECK(tokens >= 0 && tokens <= config.max_tokens, kInvalidArgument, "T=", tokens,
                " tokens exceed the planned max_tokens=", config.max_tokens);
  check_dtype("x", x, DType::kBF16, DType::kBF16);
  check_memory(context, "x", x);
  check_row_major("x", x);
  check_vector_rows(context, "x", x);
  check_shape("topk_ids", input.topk_ids_TK, {tokens, config.top_k});
  check_dtype("topk_ids", input.topk_ids_TK, DType::kI32, DType::kI64);
  check_memory(context, "topk_ids", input.topk_ids_TK);
  check_shape("topk_scores", input.topk_scores_TK, {tokens, config.top_k});
  check_dtype("topk_scores", input.topk_scores_TK, DType::kF32, DType::kBF16);
  check_memory(context, "topk_scores", input.topk_scores_TK);
}

template <typename Id>
void check_id_range(const TensorView& ids, std::int64_t num_experts) {
  const auto* data = static_cast<const Id*>(ids.data);
  for (std::int64_t token = 0; token < ids.shape[0]; ++token) {
    for (std::int64_t k = 0; k < ids.shape[1]; ++k) {
      const std::int64_t id = data[token * ids.strides[0] + k * ids.strides[1]];
      DISTMOE_CHECK(id >= -1 && id < num_experts, kInvalidArgument, "topk_ids[", token, ", ", k,
                    "] is ", id, "; legal are 0 to ", num_experts - 1, ", and -1 for no expert");
    }
  }
}

/// Ids in device memory are checked by the kernel that publishes them.
void check_ids(const ContextImpl& context, const TensorView& ids) {
  if (context.device().type != DeviceType::kCpu) return;
  if (ids.dtype == DType::kI64) {
    check_id_range<std::int64_t>(ids, context.config().num_experts);
  } else {
    check_id_range<std::int32_t>(ids, context.config().num_experts);
  }
}

std::int64_t stride_or_zero(const TensorView& tensor, int dim) {
  return tensor.shape[dim] > 1 ? tensor.strides[dim] : 0;
}

void resolve_w13(const ContextImpl& context, const TensorView& w13, std::int64_t num_local,
                 ExpertMatrices& experts) {
  const Config& config = context.config();
  const bool has_halves = w13.rank == 4;
  if (has_halves) {
    check_shape("w13", w13, {num_local, 2, config.intermediate_dim, config.hidden_dim});
    DISTMOE_CHECK(config.gate_up_layout == GateUpLayout::kConcatenated, kInvalidArgument,
                  "w13 of shape [L, 2, F, D] names its halves; interleaved weights are [L, 2F, D]");
  } else {
    check_shape("w13", w13, {num_local, 2 * config.intermediate_dim, config.hidden_dim});
  }
  check_dtype("w13", w13, DType::kBF16, DType::kBF16);
  check_memory(context, "w13", w13);
  check_row_major("w13", w13);
  check_vector_rows(context, "w13", w13);
  check_weight_strides(context, "w13", w13);
  const int row_dim = has_halves ? 2 : 1;
  // A half of one row has no stride between rows.
  const std::int64_t row_stride =
      w13.shape[row_dim] == 1 ? config.hidden_dim : w13.strides[row_dim];
  DISTMOE_CHECK(w13.num_elements() == 0 || row_stride >= config.hidden_dim, kInvalidArgument,
                "rows of w13 need a stride of at least ", config.hidden_dim, ", got ",
                w13.describe());
  experts.gate = static_cast<const BF16*>(w13.data);
  experts.w13_expert_stride = stride_or_zero(w13, 0);
  if (num_local == 0) return;
  const bool is_interleaved = config.gate_up_layout == GateUpLayout::kInterleaved;
  experts.w13_row_stride = is_interleaved ? 2 * row_stride : row_stride;
  const std::int64_t to_up = is_interleaved ? row_stride
                             : has_halves   ? w13.strides[1]
                                            : config.intermediate_dim * row_stride;
  experts.up = experts.gate + to_up;
}

void resolve_w2(const ContextImpl& context, const TensorView& w2, std::int64_t num_local,
                ExpertMatrices& experts) {
  const Config& config = context.config();
  check_shape("w2", w2, {num_local, config.hidden_dim, config.intermediate_dim});
  check_dtype("w2", w2, DType::kBF16, DType::kBF16);
  check_memory(context, "w2", w2);
  check_row_major("w2", w2);
  check_vector_rows(context, "w2", w2);
  check_weight_strides(context, "w2", w2);
  DISTMOE_CHECK(
      w2.num_elements() == 0 || config.hidden_dim == 1 || w2.strides[1] >= config.intermediate_dim,
      kInvalidArgument, "rows of w2 need a stride of at least ", config.intermediate_dim, ", got ",
      w2.describe());
  experts.w2 = static_cast<const BF16*>(w2.data);
  experts.w2_expert_stride = stride_or_zero(w2, 0);
  experts.w2_row_stride = config.hidden_dim == 1 ? config.intermediate_dim : w2.strides[1];
}

BiasRows resolve_bias(const ContextImpl& context, const char* name, const TensorView& bias,
                      std::int64_t num_local, std::int64_t width) {
  if (!bias.is_given()) return {};
  check_shape(name, bias, {num_local, width});
  check_dtype(name, bias, DType::kBF16, DType::kF32);
  check_memory(context, name, bias);
  return {.data = bias.data,
          .dtype = bias.dtype,
          .expert_stride = stride_or_zero(bias, 0),
          .stride = stride_or_zero(bias, 1)};
}

/// Numbers that calls compute with in FP32.
bool is_finite_fp32(double value) { return std::isfinite(static_cast<float>(value)); }

void check_norm(const ContextImpl& context, const PostExpertNorm& norm) {
  const Config& config = context.config();
  DISTMOE_CHECK(config.combine == Combine::kPerRoute, kInvalidArgument,
                "post-expert RMSNorm needs every route at the owner of its token: combine per_rank "
                "sends sums, per_route rows");
  DISTMOE_CHECK(is_finite_fp32(norm.eps) && static_cast<float>(norm.eps) > 0, kInvalidArgument,
                "norm.eps is ", norm.eps, "; legal is a finite number > 0, also in FP32");
  DISTMOE_CHECK(is_finite_fp32(norm.gain_center), kInvalidArgument, "norm.gain_center is ",
                norm.gain_center, "; legal is a finite number, also in FP32");
  if (!norm.gamma_D.is_given()) {
    DISTMOE_CHECK(norm.gain_center == 0, kInvalidArgument, "norm.gain_center is ", norm.gain_center,
                  " without a norm.gamma that it belongs to");
    return;
  }
  DISTMOE_CHECK(config.inference, kInvalidArgument,
                "norm.gamma is for inference contexts: it has no gradient");
  DISTMOE_CHECK(!norm.uses_kahan, kInvalidArgument,
                "norm.uses_kahan is for a norm without norm.gamma");
  check_shape("norm.gamma", norm.gamma_D, {config.hidden_dim});
  check_dtype("norm.gamma", norm.gamma_D, DType::kBF16, DType::kBF16);
  check_memory(context, "norm.gamma", norm.gamma_D);
  check_contiguous("norm.gamma", norm.gamma_D);
}

void check_clip_statistics(const ContextImpl& context, const ClipStatistics& clip) {
  const TensorView& counts = clip.counts_3;
  if (!counts.is_given()) return;
  check_shape("clip_statistics.counts", counts, {3});
  check_dtype("clip_statistics.counts", counts, DType::kI64, DType::kF32);
  check_memory(context, "clip_statistics.counts", counts);
  check_contiguous("clip_statistics.counts", counts);
  DISTMOE_CHECK(is_finite_fp32(clip.limit), kInvalidArgument, "clip_statistics.limit is ",
                clip.limit, "; legal is a finite number, also in FP32");
}

}  // namespace

std::optional<NormCall> norm_call(const CallOptions& options) {
  if (!options.norm) return std::nullopt;
  const PostExpertNorm& norm = *options.norm;
  return NormCall{.eps = static_cast<float>(norm.eps),
                  .gamma_D = static_cast<const BF16*>(norm.gamma_D.data),
                  .gain_center = static_cast<float>(norm.gain_center),
                  .uses_kahan = norm.uses_kahan};
}

ExpertMatrices resolve_weights(const ContextImpl& context, const ExpertWeights& weights) {
  const Config& config = context.config();
  const std::int64_t num_local =
      num_local_experts(config.num_experts, context.size(), context.rank());
  ExpertMatrices experts;
  resolve_w13(context, weights.w13_L2FD, num_local, experts);
  resolve_w2(context, weights.w2_LDF, num_local, experts);
  experts.bias2 = resolve_bias(context, "bias2", weights.bias2_LD, num_local, config.hidden_dim);
  const BiasRows bias13 =
      resolve_bias(context, "bias13", weights.bias13_L2F, num_local, 2 * config.intermediate_dim);
  experts.gate_bias = bias13;
  experts.up_bias = bias13;
  if (bias13.data == nullptr) return experts;
  const bool is_interleaved = config.gate_up_layout == GateUpLayout::kInterleaved;
  const std::int64_t to_up = (is_interleaved ? 1 : config.intermediate_dim) * bias13.stride;
  experts.up_bias.data = static_cast<const std::byte*>(bias13.data) +
                         to_up * static_cast<std::int64_t>(size_of(bias13.dtype));
  if (is_interleaved) experts.gate_bias.stride = experts.up_bias.stride = 2 * bias13.stride;
  return experts;
}

ForwardCall check_forward_call(const ContextImpl& context, std::int64_t call_index,
                               const RoutedInput& input, const ExpertWeights& weights,
                               const TensorView& y_TD, const CallOptions& options) {
  check_activations(context, input);
  check_ids(context, input.topk_ids_TK);
  const std::int64_t tokens = input.x_TD.shape[0];
  check_output_rows(context, "y", y_TD, tokens);
  if (options.norm) check_norm(context, *options.norm);
  check_clip_statistics(context, options.clip_statistics);
  return {.index = call_index,
          .num_tokens = tokens,
          .x_TD = input.x_TD,
          .topk_ids_TK = input.topk_ids_TK,
          .topk_scores_TK = input.topk_scores_TK,
          .experts = resolve_weights(context, weights),
          .y_TD = y_TD,
          .norm = norm_call(options),
          .clip_counts_3 = options.clip_statistics.counts_3,
          .clip_limit = static_cast<float>(options.clip_statistics.limit),
          .stream = options.stream};
}

}  // namespace distmoe
