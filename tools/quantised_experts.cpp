// SPDX-License-Identifier: Apache-2.0
#include "quantised_experts.hpp"

#include "core/check.hpp"
#include "formats/block_scaled.hpp"
#include "formats/block_scales.hpp"
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
    matrix.global_scale = *static_cast<const float*>(weight.global_scales.data);
  }
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(matrix.scales.data());
  const std::uint8_t most = max_scale_byte(precision_of(format));
  const std::int64_t index = find_scale_above(bytes, std::ssize(matrix.scales), most);
  const std::int64_t blocks_per_row = weight.scales.shape[2];
  DISTMOE_CHECK(
      index == std::ssize(matrix.scales), kUnsupported, label, ", row ", index / blocks_per_row,
      ", columns from ", index % blocks_per_row * block_size_of(format),
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

std::int64_t block_size_of(StoredFormat format) {
  return format == StoredFormat::kNvfp4 ? kNvfp4BlockSize : kMxfp8BlockSize;
}

std::int64_t code_bytes_of(StoredFormat format, std::int64_t elements) {
  return format == StoredFormat::kMxfp8 ? elements : elements / 2;
}

QuantisedExpert quantise_expert(const LoadedExperts& experts, StoredFormat format,
                                const std::string& label) {
  const BlockScaledConfig config{.format = precision_of(format), .inference = true};
  const ExpertWeights weights = experts.view();
  QuantisedExpert expert{.w13 = prepare_block_scaled_weight(weights.w13_L2FD, config),
                         .w2 = prepare_block_scaled_weight(weights.w2_LDF, config)};
  const std::int64_t f = experts.intermediate_dim;
  expert.gate = part_of(expert.w13.view(), format, 0, f, label + ", gate");
  expert.up = part_of(expert.w13.view(), format, 1, f, label + ", up");
  expert.down = part_of(expert.w2.view(), format, 0, experts.hidden_dim, label + ", down");
  return expert;
}

}  // namespace distmoe::tools
