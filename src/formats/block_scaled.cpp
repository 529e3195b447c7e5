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

}  // namespace

std::uint16_t amax_bits(const BF16* values, std::int64_t count) { return find_amax(values, count); }

float amax_of(const BF16Rows& values) {
  std::uint16_t amax = 0;
  for (std::int64_t row = 0; row < values.num_rows; ++row) {
    amax = std::max(amax, amax_bits(values.data + row * values.row_stride, values.num_cols));
  }
  return to_float(BF16{amax});
}

}  // namespace distmoe
