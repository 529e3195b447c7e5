// SPDX-License-Identifier: Apache-2.0
//
// A row of x on its way to the ranks of its experts. Where inference computes with codes, codes
// travel, packed and at a multiple of 16 bytes:
//
//   [codes D (NVFP4: D / 2)] [NVFP4: FP32 factor of the row] [scales D / 32 (NVFP4: D / 16)] [gap]
//
// Elsewhere the row is BF16 as it is: training quantises where a row is received, along it and,
// with the rows of its expert, across it.
#pragma once

#include <cstdint>

#include "core/checked_math.hpp"
#include "distmoe/config.hpp"
#include "formats/block_format.hpp"
#include "formats/host_device.hpp"

namespace distmoe {

/// Activations are quantised and every expert's rows are padded to 128.
DISTMOE_HOST_DEVICE constexpr bool is_block_scaled(Precision precision) {
  return precision == Precision::kMXFP8 || precision == Precision::kNVFP4;
}

/// Offsets of the parts of a packed row, and its size.
struct PackedRowLayout {
  static constexpr std::int64_t kAlignment = 16;

  std::int64_t factor = 0;  ///< NVFP4 alone
  std::int64_t scales = 0;
  std::int64_t bytes = 0;

  /// `precision` is block-scaled and divides the width into whole blocks.
  PackedRowLayout(Precision precision, std::int64_t width) {
    const BlockFormat format = block_format_of(precision);
    factor = format.code_bytes(width);
    scales = factor + format.factor_bytes;
    bytes = ceil_div(scales + format.num_scales(width), kAlignment) * kAlignment;
  }
};

/// Bytes of a row of x on its way.
inline std::int64_t dispatched_row_bytes(const Config& config) {
  constexpr std::int64_t kBF16Bytes = 2;
  return config.inference && is_block_scaled(config.precision)
             ? PackedRowLayout(config.precision, config.hidden_dim).bytes
             : checked_mul(config.hidden_dim, kBF16Bytes);
}

}  // namespace distmoe
