// SPDX-License-Identifier: Apache-2.0
#include "formats/block_scaled.hpp"

#include <algorithm>

#include "core/simd.hpp"
#include "formats/block_runs.hpp"
#include "formats/block_scales.hpp"

namespace distmoe {
namespace {

// NOTE: in here, because the clones of a function with a name outside are exported, hidden
// visibility or not.
DISTMOE_SIMD_CLONES std::uint16_t find_amax(const BF16* values, std::int64_t count) {
  std::uint16_t amax = 0;
  for (std::int64_t i = 0; i < count; ++i) amax = std::max(amax, magnitude_bits(values[i]));
  return amax;
}

DISTMOE_SIMD_CLONES std::uint8_t largest_byte(const std::uint8_t* bytes, std::int64_t count) {
  std::uint8_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) largest = std::max(largest, bytes[i]);
  return largest;
}

}  // namespace

std::uint16_t amax_bits(const BF16* values, std::int64_t count) { return find_amax(values, count); }

std::int64_t find_scale_above(const std::uint8_t* scales, std::int64_t count, std::uint8_t most) {
  // NOTE: almost always there is none, and a search that may stop is several times slower.
  if (largest_byte(scales, count) <= most) return count;
  return std::find_if(scales, scales + count, [=](std::uint8_t byte) { return byte > most; }) -
         scales;
}

float amax_of(const BF16Rows& values) {
  std::uint16_t amax = 0;
  for (std::int64_t row = 0; row < values.num_rows; ++row) {
    amax = std::max(amax, amax_bits(values.data + row * values.row_stride, values.num_cols));
  }
  return to_float(BF16{amax});
}

}  // namespace distmoe
