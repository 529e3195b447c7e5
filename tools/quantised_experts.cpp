// SPDX-License-Identifier: Apache-2.0
#include "quantised_experts.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "formats/block_format.hpp"
#include "formats/block_scaled.hpp"
#include "runtime/prepared_layout.hpp"

namespace distmoe::tools {
namespace {

/// Rows [part * rows, (part + 1) * rows) of the one expert of a weight. The first scale that no
/// checkpoint may have stands for an element that the format cannot hold.
QuantisedMatrix part_of(const PreparedWeightView& weight, StoredFormat format, std::int64_t part,
                        std::int64_t rows, const std::string& label) {
  const auto rows_of = [&](const TensorView& array) {
    const auto size = static_cast<std::size_t>(rows * array.strides[1]);
    return std::span(static_cast<const std::byte*>(array.data), array.num_bytes())
        .subspan(static_cast<std::size_t>(part) * size, size);
  };
  QuantisedMatrix matrix{rows_of(weight.codes), rows_of(weight.scales)};
  if (weight.global_scales.is_given()) {
    // A checkpoint may have one for the gate and one for the up rows.
    const auto* scales = static_cast<const float*>(weight.global_scales.data);
    matrix.global_scale = scales[std::min(part, weight.global_scales.shape[1] - 1)];
  }
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(matrix.scales.data());
  const std::uint8_t most = max_scale_byte(precision_of(format));
  const std::int64_t index = find_scale_above(bytes, std::ssize(matrix.scales), most);
  const std::int64_t blocks_per_row = weight.scales.shape[2];
  DISTMOE_CHECK(
      index == std::ssize(matrix.scales), kUnsupported, label, ", row ", index / blocks_per_row,
      ", columns from ", index % blocks_per_row * block_format_of(precision_of(format)).block_size,
      ": a weight is NaN, infinite or too large for ", format_name(format),
      " (its scale would be byte ", int{bytes[index]}, "; legal are 0 to ", int{most}, ')');
  return matrix;
}

}  // namespace

const char* format_name(StoredFormat format) {
  switch (format) {
    case StoredFormat::kBF16: return "bf16";
    case StoredFormat::kFp8Blocks: return "fp8";
    case StoredFormat::kMxfp8: return "mxfp8";
    case StoredFormat::kMxfp4: return "mxfp4";
    case StoredFormat::kNvfp4: return "nvfp4";
  }
  return "";
}

QuantisedExpert quantise_expert(const Checkpoint& checkpoint, std::int64_t layer,
                                std::int64_t expert, StoredFormat format) {
  QuantisedExpert quantised{.weights =
                                LayerWeights(checkpoint, {.layer = layer,
                                                          .first_expert = expert,
                                                          .num_experts = 1,
                                                          .precision = precision_of(format)})};
  const ExpertWeights view = quantised.weights.view();
  const std::string label = concat("layer ", layer, ", expert ", expert);
  const std::int64_t f = checkpoint.shape().intermediate_dim;
  const std::int64_t d = checkpoint.shape().hidden_dim;
  quantised.gate = part_of(view.prepared_w13, format, 0, f, label + ", gate");
  quantised.up = part_of(view.prepared_w13, format, 1, f, label + ", up");
  quantised.down = part_of(view.prepared_w2, format, 0, d, label + ", down");
  return quantised;
}

}  // namespace distmoe::tools
