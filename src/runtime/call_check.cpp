// SPDX-License-Identifier: Apache-2.0
#include "runtime/call_check.hpp"

#include <cmath>
#include <cstdint>

#include "core/check.hpp"
#include "core/current_error.hpp"
#include "plan/option_names.hpp"
#include "runtime/context_impl.hpp"
#include "runtime/overlap_check.hpp"
#include "runtime/tensor_check.hpp"
#include "runtime/weight_check.hpp"

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
  DISTMOE_CHECK(context.config().precision == Precision::kBF16, kUnsupported,
                "clip statistics are of bf16 contexts; this one computes ",
                option_name(context.config().precision));
  check_shape("clip_statistics.counts", counts, {3});
  check_dtype("clip_statistics.counts", counts, DType::kI64, DType::kF32);
  check_memory(context, "clip_statistics.counts", counts);
  check_contiguous("clip_statistics.counts", counts);
  DISTMOE_CHECK(is_finite_fp32(clip.limit), kInvalidArgument, "clip_statistics.limit is ",
                clip.limit, "; legal is a finite number, also in FP32");
}

/// All of x is read before y is written, so that y may take its place; one that lies across it is
/// a mistake.
bool is_in_place(const TensorView& x, const TensorView& y) {
  return x.data == y.data && x.dtype == y.dtype && x.strides[0] == y.strides[0];
}

/// What is written over an argument changes it for the next call, and what the call does not expect
/// in its place is seldom meant.
void check_places(const RoutedInput& input, const ExpertWeights& weights, const TensorView& y_TD,
                  const CallOptions& options) {
  const TensorView none;
  check_apart({{"y", &y_TD, Access::kWritten},
               {"clip_statistics.counts", &options.clip_statistics.counts_3, Access::kWritten},
               {"x", is_in_place(input.x_TD, y_TD) ? &none : &input.x_TD, Access::kRead},
               {"topk_ids", &input.topk_ids_TK, Access::kRead},
               {"topk_scores", &input.topk_scores_TK, Access::kRead},
               {"w13", &weights.w13_L2FD, Access::kRead},
               {"w2", &weights.w2_LDF, Access::kRead},
               {"codes of w13", &weights.prepared_w13.codes, Access::kRead},
               {"scales of w13", &weights.prepared_w13.scales, Access::kRead},
               {"global scales of w13", &weights.prepared_w13.global_scales, Access::kRead},
               {"codes of w2", &weights.prepared_w2.codes, Access::kRead},
               {"scales of w2", &weights.prepared_w2.scales, Access::kRead},
               {"global scales of w2", &weights.prepared_w2.global_scales, Access::kRead},
               {"bias13", &weights.bias13_L2F, Access::kRead},
               {"bias2", &weights.bias2_LD, Access::kRead},
               {"norm.gamma", options.norm ? &options.norm->gamma_D : &none, Access::kRead}});
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

ForwardCall check_forward_call(const ContextImpl& context, std::int64_t call_index,
                               const RoutedInput& input, const ExpertWeights& weights,
                               const TensorView& y_TD, const CallOptions& options, Values values) {
  check_activations(context, input);
  if (values == Values::kChecked) check_ids(context, input.topk_ids_TK);
  const std::int64_t tokens = input.x_TD.shape[0];
  check_output_rows(context, "y", y_TD, tokens);
  if (options.norm) check_norm(context, *options.norm);
  check_clip_statistics(context, options.clip_statistics);
  const ExpertMatrices experts = resolve_weights(context, weights, values);
  if (values == Values::kChecked) check_places(input, weights, y_TD, options);
  return {.index = call_index,
          .num_tokens = tokens,
          .x_TD = input.x_TD,
          .topk_ids_TK = input.topk_ids_TK,
          .topk_scores_TK = input.topk_scores_TK,
          .experts = experts,
          .y_TD = y_TD,
          .norm = norm_call(options),
          .clip_counts_3 = options.clip_statistics.counts_3,
          .clip_limit = static_cast<float>(options.clip_statistics.limit),
          .stream = options.stream};
}

void check_routed_experts(const Context& context, const RoutedInput& input,
                          const ExpertWeights& weights, const TensorView& y_TD,
                          const CallOptions& options) {
  only_errors("the check of a call", [&] {
    const ContextImpl& impl = context.impl();
    impl.check_usable();
    check_forward_call(impl, 0, input, weights, y_TD, options, Values::kIgnored);
  });
}

}  // namespace distmoe
