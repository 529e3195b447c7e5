// SPDX-License-Identifier: Apache-2.0
//
// How many codes and scales a precision has: the one place that says it for sizes of buffers, of
// packed rows, of prepared weights and of checkpoints.
#pragma once

#include <cstdint>

#include "core/checked_math.hpp"
#include "distmoe/config.hpp"
#include "formats/block_scales.hpp"
#include "formats/host_device.hpp"

namespace distmoe {

struct BlockFormat {
  std::int64_t block_size = 0;      ///< elements of a line that share a scale
  std::int64_t codes_per_byte = 0;  ///< along a row
  std::int64_t factor_bytes = 0;    ///< FP32, of a row or of an expert's weight

  DISTMOE_HOST_DEVICE constexpr bool has_factors() const { return factor_bytes != 0; }
  /// Bytes of the codes of a row.
  DISTMOE_HOST_DEVICE constexpr std::int64_t code_bytes(std::int64_t elements) const {
    return ceil_div(elements, codes_per_byte);
  }
  /// Scales, of one byte, of a line along which elements share them.
  DISTMOE_HOST_DEVICE constexpr std::int64_t num_scales(std::int64_t elements) const {
    return ceil_div(elements, block_size);
  }
};

/// Of a precision that has codes.
DISTMOE_HOST_DEVICE constexpr BlockFormat block_format_of(Precision precision) {
  switch (precision) {
    case Precision::kNVFP4: return {kNvfp4BlockSize, 2, sizeof(float)};
    case Precision::kMXFP4: return {kMxfp4BlockSize, 2, 0};
    default: return {kMxfp8BlockSize, 1, 0};
  }
}

}  // namespace distmoe
