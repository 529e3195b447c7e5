// SPDX-License-Identifier: Apache-2.0
//
// Experts of a checkpoint as the weights of a call.
#include <algorithm>

#include "core/check.hpp"
#include "io/checkpoint.hpp"
#include "runtime/prepared_layout.hpp"

namespace distmoe {
namespace {

ExpertWeights bias_view(const ExpertBiases& experts) {
  ExpertWeights weights;
  if (!experts.has_bias) return weights;
  const std::int64_t count = experts.num_experts;
  weights.bias13_L2F = TensorView(experts.bias13.data(), experts.bias13_dtype,
                                  {count, 2 * experts.intermediate_dim});
  weights.bias2_LD =
      TensorView(experts.bias2.data(), experts.bias2_dtype, {count, experts.hidden_dim});
  return weights;
}

std::int64_t bytes_of(const TensorStorage& storage) {
  return static_cast<std::int64_t>(storage.num_bytes());
}
std::int64_t bytes_of(const CodedWeight& weight) {
  return bytes_of(weight.codes) + bytes_of(weight.scales) + bytes_of(weight.global_scales);
}
std::int64_t bytes_of(const ExpertBiases& experts) {
  return bytes_of(experts.bias13) + bytes_of(experts.bias2);
}

/// [L, rows, columns]; the checkpoint's scales were looked at when they were read.
PreparedWeightView prepared_view(const CodedExperts& experts, const CodedWeight& weight,
                                 std::int64_t rows, std::int64_t columns) {
  const std::int64_t count = experts.num_experts;
  const BlockScaledConfig config{.format = precision_of(experts.format),
                                 .inference = experts.blocks != BlockShape::kTiles};
  PreparedWeightView view = prepared_layout(config, count, rows, columns);
  view.codes.data = weight.codes.data();
  view.scales.data = weight.scales.data();
  if (view.global_scales.is_given()) {
    const std::int64_t factors = bytes_of(weight.global_scales) /
                                 static_cast<std::int64_t>(sizeof(float)) /
                                 std::max(count, std::int64_t{1});
    view.global_scales = {weight.global_scales.data(), DType::kF32, {count, factors}};
  }
  view.has_known_scales = true;
  return view;
}

}  // namespace

Precision precision_of(StoredFormat format) {
  switch (format) {
    case StoredFormat::kMxfp8: return Precision::kMXFP8;
    case StoredFormat::kMxfp4: return Precision::kMXFP4;
    case StoredFormat::kNvfp4: return Precision::kNVFP4;
    case StoredFormat::kBF16:
    case StoredFormat::kFp8Blocks: break;
  }
  throw_error(ErrorCode::kInternal, "no precision computes with codes of this format");
}

ExpertWeights LoadedExperts::view() const {
  ExpertWeights weights = bias_view(*this);
  weights.w13_L2FD =
      TensorView(w13.data(), DType::kBF16, {num_experts, 2 * intermediate_dim, hidden_dim});
  weights.w2_LDF = TensorView(w2.data(), DType::kBF16, {num_experts, hidden_dim, intermediate_dim});
  return weights;
}

std::int64_t LoadedExperts::num_bytes() const {
  return bytes_of(w13) + bytes_of(w2) + bytes_of(*this);
}

ExpertWeights CodedExperts::view() const {
  ExpertWeights weights = bias_view(*this);
  weights.prepared_w13 = prepared_view(*this, w13, 2 * intermediate_dim, hidden_dim);
  weights.prepared_w2 = prepared_view(*this, w2, hidden_dim, intermediate_dim);
  return weights;
}

std::int64_t CodedExperts::num_bytes() const {
  return bytes_of(w13) + bytes_of(w2) + bytes_of(*this);
}

}  // namespace distmoe
