// SPDX-License-Identifier: Apache-2.0
#include "formats/mxfp8.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/checked_math.hpp"
#include "core/simd.hpp"

namespace distmoe {
namespace {

constexpr std::int64_t kBlock = kMxfp8BlockSize;
/// Columns that are quantised together: their 32 rows stay in a core's first cache.
constexpr std::int64_t kSlab = 256;

/// What the elements of a block have in common. `keep` is 0 and `fill` the NaN code where the scale
/// is NaN.
struct BlockRule {
  float multiplier;
  std::uint8_t keep;
  std::uint8_t fill;
};

inline BlockRule rule_of(E8M0 scale) {
  const bool is_nan = scale.bits == kE8M0NaN.bits;
  return {is_nan ? 0.0f : reciprocal(scale), static_cast<std::uint8_t>(is_nan ? 0 : 0xFF),
          static_cast<std::uint8_t>(is_nan ? kE4M3NaN.bits : 0)};
}

inline E4M3 encode(BF16 value, float multiplier, std::uint8_t keep, std::uint8_t fill) {
  const E4M3 code = to_e4m3(to_float(value) * multiplier);
  return E4M3{static_cast<std::uint8_t>((code.bits & keep) | fill)};
}

inline E8M0 scale_of(std::uint16_t amax_bits) { return mxfp8_scale(to_float(BF16{amax_bits})); }

inline __attribute__((always_inline)) void quantise_block(const BF16* values, std::int64_t count,
                                                          E4M3* codes, E8M0* scale) {
  std::uint16_t amax = 0;
  for (std::int64_t i = 0; i < count; ++i) amax = std::max(amax, magnitude_bits(values[i]));
  *scale = scale_of(amax);
  const BlockRule rule = rule_of(*scale);
  for (std::int64_t i = 0; i < count; ++i) {
    codes[i] = encode(values[i], rule.multiplier, rule.keep, rule.fill);
  }
}

DISTMOE_SIMD_CLONES void quantise_row(const BF16* values, std::int64_t num_cols, E4M3* codes,
                                      E8M0* scales) {
  std::int64_t col = 0;
  for (; col + kBlock <= num_cols; col += kBlock) {
    quantise_block(values + col, kBlock, codes + col, scales++);
  }
  if (col < num_cols) quantise_block(values + col, num_cols - col, codes + col, scales);
}

/// 32 rows, or as many as there are, of `num_cols` <= kSlab columns. `num_values` of the rows lie
/// in memory, the others are zeros.
struct Band {
  const BF16* values;
  std::int64_t row_stride;
  std::int64_t num_values;
  std::int64_t num_rows;
  std::int64_t num_cols;
  E4M3* codes;
  std::int64_t code_stride;
};

struct BandRules {
  std::array<float, kSlab> multiplier;
  std::array<std::uint8_t, kSlab> keep;
  std::array<std::uint8_t, kSlab> fill;
};

DISTMOE_SIMD_CLONES void find_amax(const Band& band, std::uint16_t* amax) {
  for (std::int64_t row = 0; row < band.num_values; ++row) {
    const BF16* values = band.values + row * band.row_stride;
    for (std::int64_t col = 0; col < band.num_cols; ++col) {
      amax[col] = std::max(amax[col], magnitude_bits(values[col]));
    }
  }
}

DISTMOE_SIMD_CLONES void find_rules(const std::uint16_t* amax, std::int64_t num_cols, E8M0* scales,
                                    BandRules& rules) {
  for (std::int64_t col = 0; col < num_cols; ++col) {
    const E8M0 scale = scale_of(amax[col]);
    const BlockRule rule = rule_of(scale);
    scales[col] = scale;
    rules.multiplier[static_cast<std::size_t>(col)] = rule.multiplier;
    rules.keep[static_cast<std::size_t>(col)] = rule.keep;
    rules.fill[static_cast<std::size_t>(col)] = rule.fill;
  }
}

DISTMOE_SIMD_CLONES void encode_band(const Band& band, const BandRules& rules) {
  const float* multiplier = rules.multiplier.data();
  const std::uint8_t* keep = rules.keep.data();
  const std::uint8_t* fill = rules.fill.data();
  for (std::int64_t row = 0; row < band.num_values; ++row) {
    const BF16* values = band.values + row * band.row_stride;
    E4M3* codes = band.codes + row * band.code_stride;
    for (std::int64_t col = 0; col < band.num_cols; ++col) {
      codes[col] = encode(values[col], multiplier[col], keep[col], fill[col]);
    }
  }
  for (std::int64_t row = band.num_values; row < band.num_rows; ++row) {
    std::memcpy(band.codes + row * band.code_stride, fill, static_cast<std::size_t>(band.num_cols));
  }
}

/// Walks the bands of 32 rows, and in each of them slabs of columns.
template <typename Visit>
void for_each_band(const BF16Rows& values, const Mxfp8View& out, const Visit& visit) {
  const std::int64_t num_rows = values.num_rows + values.num_padding_rows;
  for (std::int64_t row = 0; row < num_rows; row += kBlock) {
    const std::int64_t rows = std::min(kBlock, num_rows - row);
    const std::int64_t in_memory = std::clamp(values.num_rows - row, std::int64_t{0}, rows);
    for (std::int64_t col = 0; col < values.num_cols; col += kSlab) {
      const Band band{in_memory > 0 ? values.data + row * values.row_stride + col : nullptr,
                      values.row_stride,
                      in_memory,
                      rows,
                      std::min(kSlab, values.num_cols - col),
                      out.codes + row * out.code_stride + col,
                      out.code_stride};
      visit(band, out.scales + row / kBlock * out.scale_stride, col);
    }
  }
}

/// A stretch of one row with one scale.
template <typename Value>
inline __attribute__((always_inline)) void decode_run(const E4M3* codes, E8M0 scale,
                                                      std::int64_t count, Value* out) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = decoded<Value>(codes[i], scale);
}

template <typename Value>
inline __attribute__((always_inline)) void decode_along_row(const E4M3* codes, const E8M0* scales,
                                                            std::int64_t num_cols, Value* out) {
  std::int64_t col = 0;
  for (; col + kBlock <= num_cols; col += kBlock) {
    decode_run(codes + col, *scales++, kBlock, out + col);
  }
  if (col < num_cols) decode_run(codes + col, *scales, num_cols - col, out + col);
}

template <typename Value>
inline __attribute__((always_inline)) void decode_across_columns(const E4M3* codes,
                                                                 const E8M0* scales,
                                                                 std::int64_t num_cols,
                                                                 Value* out) {
  for (std::int64_t col = 0; col < num_cols; ++col)
    out[col] = decoded<Value>(codes[col], scales[col]);
}

DISTMOE_SIMD_CLONES void decode_row(BlockShape shape, const E4M3* codes, const E8M0* scales,
                                    std::int64_t num_cols, BF16* out) {
  if (shape == BlockShape::kColumns) return decode_across_columns(codes, scales, num_cols, out);
  decode_along_row(codes, scales, num_cols, out);
}
void decode_row(BlockShape shape, const E4M3* codes, const E8M0* scales, std::int64_t num_cols,
                double* out) {
  if (shape == BlockShape::kColumns) return decode_across_columns(codes, scales, num_cols, out);
  decode_along_row(codes, scales, num_cols, out);
}

template <typename Value>
void decode(const ConstMxfp8View& view, BlockShape shape, const DecodedRows<Value>& out) {
  for (std::int64_t row = 0; row < out.num_rows; ++row) {
    const std::int64_t scale_row = shape == BlockShape::kRows ? row : row / kBlock;
    decode_row(shape, view.codes + row * view.code_stride,
               view.scales + scale_row * view.scale_stride, out.num_cols,
               out.data + row * out.row_stride);
  }
}

std::int64_t code_bytes(std::int64_t num_rows, std::int64_t num_cols) {
  return align_up(checked_mul(num_rows, num_cols));
}
std::int64_t scale_row_bytes(BlockShape shape, std::int64_t num_cols) {
  return shape == BlockShape::kColumns ? num_cols : ceil_div(num_cols, kBlock);
}

}  // namespace

void quantise_mxfp8_rows(const BF16Rows& values, const Mxfp8View& out) {
  for (std::int64_t row = 0; row < values.num_rows; ++row) {
    quantise_row(values.data + row * values.row_stride, values.num_cols,
                 out.codes + row * out.code_stride, out.scales + row * out.scale_stride);
  }
  for (std::int64_t i = 0; i < values.num_padding_rows; ++i) {
    const std::int64_t row = values.num_rows + i;
    std::fill_n(out.codes + row * out.code_stride, values.num_cols, E4M3{0});
    std::fill_n(out.scales + row * out.scale_stride, ceil_div(values.num_cols, kBlock), E8M0{0});
  }
}

void quantise_mxfp8_columns(const BF16Rows& values, const Mxfp8View& out) {
  for_each_band(values, out, [](const Band& band, E8M0* scales, std::int64_t col) {
    std::array<std::uint16_t, kSlab> amax{};
    BandRules rules;
    find_amax(band, amax.data());
    find_rules(amax.data(), band.num_cols, scales + col, rules);
    encode_band(band, rules);
  });
}

void quantise_mxfp8_tiles(const BF16Rows& values, const Mxfp8View& out) {
  for_each_band(values, out, [](const Band& band, E8M0* scales, std::int64_t col) {
    std::array<std::uint16_t, kSlab> amax{};
    BandRules rules;
    find_amax(band, amax.data());
    std::array<E8M0, kSlab> of_column;
    for (std::int64_t begin = 0; begin < band.num_cols; begin += kBlock) {
      const auto first = amax.begin() + begin;
      const auto last = amax.begin() + std::min(begin + kBlock, band.num_cols);
      std::fill(first, last, *std::max_element(first, last));
    }
    find_rules(amax.data(), band.num_cols, of_column.data(), rules);
    for (std::int64_t begin = 0; begin < band.num_cols; begin += kBlock) {
      scales[(col + begin) / kBlock] = of_column[static_cast<std::size_t>(begin)];
    }
    encode_band(band, rules);
  });
}

void decode_mxfp8(const ConstMxfp8View& view, BlockShape shape, const DecodedRows<BF16>& out) {
  decode(view, shape, out);
}
void decode_mxfp8(const ConstMxfp8View& view, BlockShape shape, const DecodedRows<double>& out) {
  decode(view, shape, out);
}

Mxfp8View mxfp8_region(std::byte* region, BlockShape shape, std::int64_t num_rows,
                       std::int64_t num_cols) {
  return {reinterpret_cast<E4M3*>(region),
          reinterpret_cast<E8M0*>(region + code_bytes(num_rows, num_cols)), num_cols,
          scale_row_bytes(shape, num_cols)};
}

std::int64_t mxfp8_region_bytes(BlockShape shape, std::int64_t num_rows, std::int64_t num_cols) {
  const std::int64_t scale_rows =
      shape == BlockShape::kRows ? num_rows : ceil_div(num_rows, kBlock);
  return code_bytes(num_rows, num_cols) +
         align_up(checked_mul(scale_rows, scale_row_bytes(shape, num_cols)));
}

}  // namespace distmoe
