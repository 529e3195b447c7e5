// SPDX-License-Identifier: Apache-2.0
#include "quantised_experts.hpp"

#include "core/check.hpp"
#include "formats/mxfp4.hpp"
#include "formats/mxfp8.hpp"
#include "formats/nvfp4.hpp"
#include "io/stored_scales.hpp"

namespace distmoe::tools {
namespace {

/// The first scale that no checkpoint may have stands for a weight that the format cannot hold.
void check_scales(const QuantisedMatrix& matrix, StoredFormat format, std::int64_t blocks_per_row,
                  const std::string& label) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(matrix.scales.data());
  const std::uint8_t most = max_scale_byte(format);
  const std::int64_t index = find_scale_above(bytes, std::ssize(matrix.scales), most);
  if (index == std::ssize(matrix.scales)) return;
  throw_error(
      ErrorCode::kUnsupported,
      concat(label, ", row ", index / blocks_per_row, ", columns from ",
             index % blocks_per_row * block_size_of(format),
             ": a weight is NaN, infinite or too large for ", format_name(format),
             " (its scale would be byte ", int{bytes[index]}, "; legal are 0 to ", int{most}, ')'));
}

/// `expert_amax` is used by kNvfp4 alone.
QuantisedMatrix quantise(const BF16Rows& values, StoredFormat format, float expert_amax,
                         const std::string& label) {
  const std::int64_t blocks_per_row = values.num_cols / block_size_of(format);
  const std::int64_t code_row = code_bytes_of(format, values.num_cols);
  QuantisedMatrix matrix;
  matrix.codes.resize(static_cast<std::size_t>(values.num_rows * code_row));
  matrix.scales.resize(static_cast<std::size_t>(values.num_rows * blocks_per_row));
  auto* bytes = reinterpret_cast<std::uint8_t*>(matrix.codes.data());
  auto* powers = reinterpret_cast<E8M0*>(matrix.scales.data());
  if (format == StoredFormat::kMxfp8) {
    quantise_mxfp8_rows(values, {reinterpret_cast<E4M3*>(bytes), powers, code_row, blocks_per_row});
  } else if (format == StoredFormat::kMxfp4) {
    quantise_mxfp4(values, {bytes, powers, code_row, blocks_per_row});
  } else {
    auto* scales = reinterpret_cast<E4M3*>(matrix.scales.data());
    matrix.global_scale = 1.0f / quantise_nvfp4_expert(values, expert_amax,
                                                       {bytes, scales, code_row, blocks_per_row});
  }
  check_scales(matrix, format, blocks_per_row, label);
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
  const std::int64_t d = experts.hidden_dim;
  const std::int64_t f = experts.intermediate_dim;
  const auto* w13 = reinterpret_cast<const BF16*>(experts.w13.data());
  const auto* w2 = reinterpret_cast<const BF16*>(experts.w2.data());
  const BF16Rows down{w2, d, f, f};
  const float amax13 = amax_of({w13, 2 * f, d, d});
  return {quantise({w13, f, d, d}, format, amax13, label + ", gate"),
          quantise({w13 + f * d, f, d, d}, format, amax13, label + ", up"),
          quantise(down, format, amax_of(down), label + ", down")};
}

}  // namespace distmoe::tools
