// SPDX-License-Identifier: Apache-2.0
#include "runtime/prepared_layout.hpp"

#include <cmath>

#include "core/check.hpp"
#include "distmoe/quantise.hpp"
#include "formats/block_format.hpp"
#include "formats/block_scaled.hpp"
#include "plan/option_names.hpp"
#include "runtime/tensor_check.hpp"

namespace distmoe {
namespace {

void check_multiple(const BlockScaledConfig& config, const char* name, std::int64_t value,
                    std::int64_t block) {
  DISTMOE_CHECK(value % block == 0, kInvalidArgument, "a weight to prepare has ", value, " ", name,
                "; ", option_name(config.format), config.inference ? " inference" : " training",
                config.gate_up_layout == GateUpLayout::kInterleaved ? " of interleaved rows" : "",
                " needs a multiple of ", block);
}

void check_format(const BlockScaledConfig& config) {
  check_choice("gate_up_layout", config.gate_up_layout);
  const Precision format = config.format;
  DISTMOE_CHECK(
      format == Precision::kMXFP8 || format == Precision::kNVFP4 || format == Precision::kMXFP4,
      kInvalidArgument, "the format of a prepared weight is ", option_name(format),
      "; legal are mxfp8, nvfp4 and mxfp4");
  DISTMOE_CHECK(config.inference || format == Precision::kMXFP8, kInvalidArgument,
                "the format of a prepared weight is ", option_name(format),
                " and inference is false; training takes mxfp8");
}

/// Same shape, row-major but for the expert stride, aligned.
void check_array(const char* name, const char* part, const TensorView& array,
                 const TensorView& expected) {
  bool is_right = array.rank == expected.rank && array.dtype == expected.dtype;
  for (int dim = 0; is_right && dim < expected.rank; ++dim) {
    is_right = array.shape[dim] == expected.shape[dim];
  }
  DISTMOE_CHECK(is_right, kInvalidArgument, part, " of ", name, " must be ", expected.describe(),
                ", got ", array.describe());
  if (!expected.is_given() || expected.num_elements() == 0) return;
  for (int dim = 1; dim < expected.rank; ++dim) {
    is_right = is_right && (array.shape[dim] == 1 || array.strides[dim] == expected.strides[dim]);
  }
  DISTMOE_CHECK(is_right && (array.shape[0] == 1 || array.strides[0] >= expected.strides[0]),
                kInvalidArgument, part, " of ", name,
                " must be row-major without gaps inside an expert, got ", array.describe());
  DISTMOE_CHECK(array.data != nullptr &&
                    reinterpret_cast<std::uintptr_t>(array.data) % size_of(array.dtype) == 0,
                kInvalidArgument, part, " of ", name, " lie at ", array.data,
                ", which is no address of ", to_string(array.dtype));
}

}  // namespace

std::uint8_t max_scale_byte(Precision format) {
  if (format == Precision::kNVFP4) return kNvfp4MaxScaleByte;
  return format == Precision::kMXFP4 ? kMxfp4MaxScaleByte : kMxfp8MaxScaleByte;
}

PreparedWeightView prepared_layout(const BlockScaledConfig& config, std::int64_t num_experts,
                                   std::int64_t num_rows, std::int64_t num_columns) {
  check_format(config);
  const bool has_tiles = config.format == Precision::kMXFP8 && !config.inference;
  const std::int64_t block = block_format_of(config.format).block_size;
  const std::int64_t matrices = config.gate_up_layout == GateUpLayout::kInterleaved ? 2 : 1;
  check_multiple(config, "columns", num_columns, block);
  check_multiple(config, "rows", num_rows, has_tiles ? matrices * block : matrices);
  const QuantisedMatrix matrix = quantised_layout(
      config.format, has_tiles ? BlockShape::kTiles : BlockShape::kRows, num_rows, num_columns);
  const auto of_every_expert = [&](const TensorView& array) {
    return TensorView(nullptr, array.dtype, {num_experts, array.shape[0], array.shape[1]});
  };
  PreparedWeightView view{.config = config};
  view.codes = of_every_expert(matrix.codes);
  view.scales = of_every_expert(matrix.scales);
  if (matrix.factors.is_given()) view.global_scales = {nullptr, DType::kF32, {num_experts, 1}};
  return view;
}

void check_prepared_layout(const char* name, const PreparedWeightView& weight,
                           std::int64_t num_experts, std::int64_t num_rows,
                           std::int64_t num_columns) {
  const PreparedWeightView expected =
      prepared_layout(weight.config, num_experts, num_rows, num_columns);
  check_array(name, "codes", weight.codes, expected.codes);
  check_array(name, "scales", weight.scales, expected.scales);
  TensorView factors = expected.global_scales;
  const bool has_two = weight.global_scales.rank == 2 && weight.global_scales.shape[1] == 2;
  if (factors.is_given() && has_two) factors = {nullptr, DType::kF32, {num_experts, 2}};
  check_array(name, "global scales", weight.global_scales, factors);
}

void check_global_scales(const char* name, const PreparedWeightView& weight) {
  const TensorView& factors = weight.global_scales;
  if (!factors.is_given()) return;
  for (std::int64_t expert = 0; expert < factors.shape[0]; ++expert) {
    for (std::int64_t half = 0; half < factors.shape[1]; ++half) {
      const float factor = static_cast<const float*>(
          factors.data)[expert * factors.strides[0] + half * factors.strides[1]];
      DISTMOE_CHECK(std::isfinite(factor) && factor > 0.0F, kInvalidArgument, "global scale [",
                    expert, ", ", half, "] of ", name, " is ", factor,
                    "; it must be finite and positive");
    }
  }
}

void check_block_scales(const char* name, const PreparedWeightView& weight) {
  const TensorView& scales = weight.scales;
  const std::uint8_t most = max_scale_byte(weight.config.format);
  const std::int64_t blocks = scales.shape[2];
  const std::int64_t count = scales.shape[1] * blocks;  // of an expert, without gaps
  if (count == 0) return;
  for (std::int64_t expert = 0; expert < scales.shape[0]; ++expert) {
    const auto* bytes = static_cast<const std::uint8_t*>(scales.data) + expert * scales.strides[0];
    const std::int64_t place = find_scale_above(bytes, count, most);
    DISTMOE_CHECK(place == count, kInvalidArgument, "scale [", expert, ", ", place / blocks, ", ",
                  place % blocks, "] of ", name, ", ", option_name(weight.config.format),
                  ", is byte ", int{bytes[place]}, "; legal are 0 to ", int{most});
  }
}

}  // namespace distmoe
