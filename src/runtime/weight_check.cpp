// SPDX-License-Identifier: Apache-2.0
#include "runtime/weight_check.hpp"

#include "core/check.hpp"
#include "plan/expert_partition.hpp"
#include "plan/option_names.hpp"
#include "runtime/context_impl.hpp"
#include "runtime/prepared_layout.hpp"
#include "runtime/tensor_check.hpp"

namespace distmoe {
namespace {

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

/// A prepared weight [L, N, K] of this context's format.
void check_prepared(const ContextImpl& context, const char* name, const PreparedWeightView& weight,
                    std::int64_t num_local, std::int64_t num_rows, std::int64_t num_columns,
                    Values values) {
  const Config& config = context.config();
  const BlockScaledConfig& made_for = weight.config;
  const auto text = [](Precision format, bool inference) {
    return concat(option_name(format), inference ? " inference" : " training");
  };
  DISTMOE_CHECK(made_for.format == config.precision && made_for.inference == config.inference,
                kInvalidArgument, name, " is prepared for ",
                text(made_for.format, made_for.inference), "; this context computes ",
                text(config.precision, config.inference));
  check_prepared_layout(name, weight, num_local, num_rows, num_columns);
  check_memory(context, name, weight.codes);
  check_memory(context, name, weight.scales);
  if (weight.global_scales.is_given()) check_memory(context, name, weight.global_scales);
  if (values == Values::kIgnored) return;
  check_global_scales(name, weight);
  if (!weight.has_known_scales) check_block_scales(name, weight);
}

CodedMatrix coded_matrix(const PreparedWeightView& weight) {
  CodedMatrix matrix{.codes = static_cast<const std::byte*>(weight.codes.data),
                     .scales = static_cast<const std::byte*>(weight.scales.data),
                     .global_scale = static_cast<const float*>(weight.global_scales.data),
                     .code_stride = weight.codes.strides[1],
                     .scale_stride = weight.scales.strides[1],
                     .code_expert_stride = stride_or_zero(weight.codes, 0),
                     .scale_expert_stride = stride_or_zero(weight.scales, 0)};
  if (weight.global_scales.is_given()) {
    matrix.global_expert_stride = stride_or_zero(weight.global_scales, 0);
  }
  return matrix;
}

void resolve_prepared_w13(const ContextImpl& context, const PreparedWeightView& w13,
                          std::int64_t num_local, Values values, ExpertMatrices& experts) {
  const Config& config = context.config();
  const std::int64_t num_rows = 2 * config.intermediate_dim;
  check_prepared(context, "prepared w13", w13, num_local, num_rows, config.hidden_dim, values);
  DISTMOE_CHECK(w13.config.gate_up_layout == config.gate_up_layout, kInvalidArgument,
                "prepared w13 has gate_up_layout ", option_name(w13.config.gate_up_layout),
                "; that of this context is ", option_name(config.gate_up_layout));
  CodedMatrix gate = coded_matrix(w13);
  CodedMatrix up = gate;
  // Of tiles or of rows: half of what there is.
  const std::int64_t scale_rows = w13.scales.shape[1];
  const bool is_interleaved = config.gate_up_layout == GateUpLayout::kInterleaved;
  up.codes += (is_interleaved ? 1 : num_rows / 2) * gate.code_stride;
  up.scales += (is_interleaved ? 1 : scale_rows / 2) * gate.scale_stride;
  if (w13.global_scales.is_given() && w13.global_scales.shape[1] == 2) {
    up.global_scale += w13.global_scales.strides[1];
  }
  if (is_interleaved) {
    for (CodedMatrix* half : {&gate, &up}) half->code_stride *= 2, half->scale_stride *= 2;
  }
  if (num_local == 0) return;
  experts.coded_gate = gate;
  experts.coded_up = up;
}

void resolve_prepared_w2(const ContextImpl& context, const PreparedWeightView& w2,
                         std::int64_t num_local, Values values, ExpertMatrices& experts) {
  const Config& config = context.config();
  check_prepared(context, "prepared w2", w2, num_local, config.hidden_dim, config.intermediate_dim,
                 values);
  DISTMOE_CHECK(w2.global_scales.rank == 0 || w2.global_scales.shape[1] == 1, kInvalidArgument,
                "prepared w2 has global scales ", w2.global_scales.describe(),
                "; it has one for each of ", num_local, " experts");
  DISTMOE_CHECK(w2.config.gate_up_layout == GateUpLayout::kConcatenated, kInvalidArgument,
                "prepared w2 has gate_up_layout interleaved, which is w13's");
  if (num_local > 0) experts.coded_w2 = coded_matrix(w2);
}

/// Whether a weight is given prepared; each is given once.
bool is_prepared(const ContextImpl& context, const char* name, const TensorView& weight,
                 const PreparedWeightView& prepared) {
  const Precision precision = context.config().precision;
  if (!prepared.is_given()) {
    DISTMOE_CHECK(precision != Precision::kNVFP4, kInvalidArgument, name, " is ",
                  weight.is_given() ? weight.describe() : "not given",
                  "; a context of nvfp4 needs it prepared: prepare_block_scaled_weight");
    return false;
  }
  DISTMOE_CHECK(!weight.is_given(), kInvalidArgument, name, " is given twice, as ",
                weight.describe(), " and prepared");
  DISTMOE_CHECK(precision != Precision::kBF16, kInvalidArgument, name, " is prepared for ",
                option_name(prepared.config.format), "; this context computes bf16");
  return true;
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

}  // namespace

ExpertMatrices resolve_weights(const ContextImpl& context, const ExpertWeights& weights,
                               Values values) {
  const Config& config = context.config();
  const std::int64_t num_local =
      num_local_experts(config.num_experts, context.size(), context.rank());
  ExpertMatrices experts;
  if (is_prepared(context, "w13", weights.w13_L2FD, weights.prepared_w13)) {
    resolve_prepared_w13(context, weights.prepared_w13, num_local, values, experts);
  } else {
    resolve_w13(context, weights.w13_L2FD, num_local, experts);
  }
  if (is_prepared(context, "w2", weights.w2_LDF, weights.prepared_w2)) {
    resolve_prepared_w2(context, weights.prepared_w2, num_local, values, experts);
  } else {
    resolve_w2(context, weights.w2_LDF, num_local, experts);
  }
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

}  // namespace distmoe
