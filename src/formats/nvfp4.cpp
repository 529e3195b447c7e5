// SPDX-License-Identifier: Apache-2.0
#include "formats/nvfp4.hpp"

#include <algorithm>
#include <array>

#include "core/checked_math.hpp"
#include "core/simd.hpp"
#include "formats/fp4_rows.hpp"

namespace distmoe {
namespace {

constexpr std::int64_t kBlock = kNvfp4BlockSize;

inline __attribute__((always_inline)) void quantise_block(const BF16* values, std::int64_t count,
                                                          float factor, std::uint8_t* codes,
                                                          E4M3* scale) {
  std::uint16_t amax = 0;
  for (std::int64_t i = 0; i < count; ++i) amax = std::max(amax, magnitude_bits(values[i]));
  *scale = nvfp4_scale(to_float(BF16{amax}), factor);
  encode_e2m1_block<kBlock>(values, count, nvfp4_multiplier(factor, *scale), codes);
}

DISTMOE_SIMD_CLONES void quantise_row(const BF16* values, std::int64_t num_cols, float factor,
                                      std::uint8_t* codes, E4M3* scales) {
  std::int64_t col = 0;
  for (; col + kBlock <= num_cols; col += kBlock) {
    quantise_block(values + col, kBlock, factor, codes + col / 2, scales++);
  }
  if (col < num_cols) quantise_block(values + col, num_cols - col, factor, codes + col / 2, scales);
}

void poison_row(std::int64_t num_cols, std::uint8_t* codes, E4M3* scales) {
  poison_e2m1(codes, num_cols);
  std::fill_n(scales, ceil_div(num_cols, kBlock), kE4M3NaN);
}

void fill_zero_row(std::int64_t num_cols, float factor, std::uint8_t* codes, E4M3* scales) {
  std::fill_n(codes, ceil_div(num_cols, 2), std::uint8_t{0});
  std::fill_n(scales, ceil_div(num_cols, kBlock), nvfp4_scale(0.0f, factor));
}

/// Row `row` under the factor of an amax of `amax`; a row of padding where it lies behind those in
/// memory.
void quantise_or_poison(const BF16Rows& values, std::int64_t row, float amax, float factor,
                        const Nvfp4View& out) {
  std::uint8_t* codes = out.codes + row * out.code_stride;
  E4M3* scales = out.scales + row * out.scale_stride;
  if (!is_finite_amax(amax)) {
    poison_row(values.num_cols, codes, scales);
  } else if (row < values.num_rows) {
    quantise_row(values.data + row * values.row_stride, values.num_cols, factor, codes, scales);
  } else {
    fill_zero_row(values.num_cols, factor, codes, scales);
  }
}

std::int64_t code_bytes(std::int64_t num_rows, std::int64_t num_cols) {
  return align_up(checked_mul(num_rows, ceil_div(num_cols, 2)));
}
std::int64_t factor_bytes(std::int64_t num_rows) {
  return checked_mul(num_rows, std::int64_t{sizeof(float)});
}

}  // namespace

void quantise_nvfp4_rows(const BF16Rows& values, const Nvfp4View& out, float* factors) {
  for (std::int64_t row = 0; row < values.num_rows + values.num_padding_rows; ++row) {
    const bool is_padding = row >= values.num_rows;
    const float amax =
        is_padding ? 0.0f : amax_of({values.data + row * values.row_stride, 1, values.num_cols});
    factors[row] = nvfp4_factor(amax, kNvfp4RowFloor);
    quantise_or_poison(values, row, amax, factors[row], out);
  }
}

float quantise_nvfp4_expert(const BF16Rows& values, float expert_amax, const Nvfp4View& out) {
  const float factor = nvfp4_factor(expert_amax, kNvfp4ExpertFloor);
  for (std::int64_t row = 0; row < values.num_rows + values.num_padding_rows; ++row) {
    quantise_or_poison(values, row, expert_amax, factor, out);
  }
  return factor;
}

void decode_nvfp4(const ConstNvfp4View& view, const DecodedRows<BF16>& out) {
  decode_fp4_rows<kBlock>(view, out);
}
void decode_nvfp4(const ConstNvfp4View& view, const DecodedRows<double>& out) {
  decode_fp4_rows<kBlock>(view, out);
}

Nvfp4Rows nvfp4_rows_region(std::byte* region, std::int64_t num_rows, std::int64_t num_cols) {
  std::byte* factors = region + code_bytes(num_rows, num_cols);
  std::byte* scales = factors + factor_bytes(num_rows);
  return {{reinterpret_cast<std::uint8_t*>(region), reinterpret_cast<E4M3*>(scales),
           ceil_div(num_cols, 2), ceil_div(num_cols, kBlock)},
          reinterpret_cast<float*>(factors)};
}

std::int64_t nvfp4_rows_region_bytes(std::int64_t num_rows, std::int64_t num_cols) {
  const std::int64_t scale_bytes = checked_mul(num_rows, ceil_div(num_cols, kBlock));
  return code_bytes(num_rows, num_cols) +
         align_up(checked_add(scale_bytes, factor_bytes(num_rows)));
}

}  // namespace distmoe
