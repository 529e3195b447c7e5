// SPDX-License-Identifier: Apache-2.0
#include "formats/mxfp4.hpp"

#include <algorithm>
#include <array>
#include <cstddef>

#include "core/checked_math.hpp"
#include "core/simd.hpp"
#include "formats/fp4_rows.hpp"

namespace distmoe {
namespace {

constexpr std::int64_t kBlock = kMxfp4BlockSize;

inline __attribute__((always_inline)) void quantise_block(const BF16* values, std::int64_t count,
                                                          std::uint8_t* codes, E8M0* scale) {
  std::uint16_t amax = 0;
  for (std::int64_t i = 0; i < count; ++i) amax = std::max(amax, magnitude_bits(values[i]));
  *scale = mxfp4_scale(to_float(BF16{amax}));
  if (scale->bits == kE8M0NaN.bits) return poison_e2m1(codes, count);
  encode_e2m1_block<kBlock>(values, count, reciprocal(*scale), codes);
}

DISTMOE_SIMD_CLONES void quantise_row(const BF16* values, std::int64_t num_cols,
                                      std::uint8_t* codes, E8M0* scales) {
  std::int64_t col = 0;
  for (; col + kBlock <= num_cols; col += kBlock) {
    quantise_block(values + col, kBlock, codes + col / 2, scales++);
  }
  if (col < num_cols) quantise_block(values + col, num_cols - col, codes + col / 2, scales);
}

}  // namespace

void quantise_mxfp4(const BF16Rows& values, const Mxfp4View& out) {
  for (std::int64_t row = 0; row < values.num_rows; ++row) {
    quantise_row(values.data + row * values.row_stride, values.num_cols,
                 out.codes + row * out.code_stride, out.scales + row * out.scale_stride);
  }
  for (std::int64_t i = 0; i < values.num_padding_rows; ++i) {
    const std::int64_t row = values.num_rows + i;
    std::fill_n(out.codes + row * out.code_stride, ceil_div(values.num_cols, 2), std::uint8_t{0});
    std::fill_n(out.scales + row * out.scale_stride, ceil_div(values.num_cols, kBlock), E8M0{0});
  }
}

void decode_mxfp4(const ConstMxfp4View& view, const DecodedRows<BF16>& out) {
  decode_fp4_rows<kBlock>(view, out);
}
void decode_mxfp4(const ConstMxfp4View& view, const DecodedRows<double>& out) {
  decode_fp4_rows<kBlock>(view, out);
}

}  // namespace distmoe
