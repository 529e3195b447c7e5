// SPDX-License-Identifier: Apache-2.0
#include "formats/block_encoders.hpp"

#include <algorithm>

#include "core/simd.hpp"

namespace distmoe {
namespace {

inline E4M3 encode(BF16 value, E8M0 scale) {
  const bool is_nan = scale.bits == kE8M0NaN.bits;
  const E4M3 code = to_e4m3(to_float(value) * reciprocal(scale));
  return is_nan ? kE4M3NaN : code;
}

DISTMOE_SIMD_CLONES void encode_e4m3_blocks(const BF16* values, std::int64_t num_blocks,
                                            const E8M0* scales, E4M3* codes) {
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    const E8M0 scale = scales[block];
    for (std::int64_t i = 0; i < kMxfp8BlockSize; ++i) codes[i] = encode(values[i], scale);
    values += kMxfp8BlockSize;
    codes += kMxfp8BlockSize;
  }
}

DISTMOE_SIMD_CLONES void encode_e4m3_columns(const BF16* values, std::int64_t count,
                                             const E8M0* scales, E4M3* codes) {
  for (std::int64_t i = 0; i < count; ++i) codes[i] = encode(values[i], scales[i]);
}

/// Where there is one.
void prefetch_row(const BF16Rows& rows, std::int64_t row) {
  if (row >= rows.num_rows) return;
  prefetch(rows.data + row * rows.row_stride,
           rows.num_cols * static_cast<std::int64_t>(sizeof(BF16)));
}

void encode_e4m3_rows(const RowsToEncode& rows, std::int64_t num_cols, const E8M0* scales) {
  for (std::int64_t row = 0; row < rows.num_rows; ++row) {
    prefetch_row(rows.ahead, row);
    encode_e4m3_columns(rows.values + row * rows.row_stride, num_cols, scales,
                        rows.codes + row * rows.code_stride);
  }
}

template <std::int64_t Block>
inline __attribute__((always_inline)) void encode_e2m1(const BF16* values, std::int64_t num_blocks,
                                                       const float* multipliers,
                                                       std::uint8_t* codes) {
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    const float multiplier = multipliers[block];
    for (std::int64_t i = 0; i < Block / 2; ++i) {
      codes[i] = pack_e2m1(to_e2m1(to_float(values[2 * i]) * multiplier),
                           to_e2m1(to_float(values[2 * i + 1]) * multiplier));
    }
    values += Block;
    codes += Block / 2;
  }
}

DISTMOE_SIMD_CLONES void encode_e2m1_blocks16(const BF16* values, std::int64_t num_blocks,
                                              const float* multipliers, std::uint8_t* codes) {
  encode_e2m1<16>(values, num_blocks, multipliers, codes);
}
DISTMOE_SIMD_CLONES void encode_e2m1_blocks32(const BF16* values, std::int64_t num_blocks,
                                              const float* multipliers, std::uint8_t* codes) {
  encode_e2m1<32>(values, num_blocks, multipliers, codes);
}

DISTMOE_SIMD_CLONES void find_nvfp4_scales(const BF16* amax, std::int64_t count, float factor,
                                           E4M3* scales, float* multipliers) {
  for (std::int64_t i = 0; i < count; ++i) {
    scales[i] = nvfp4_scale(to_float(amax[i]), factor);
    multipliers[i] = nvfp4_multiplier(factor, scales[i]);
  }
}

template <std::int64_t Block>
inline __attribute__((always_inline)) void find_block_amax(const BF16* values,
                                                           std::int64_t num_blocks, BF16* amax) {
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    std::uint16_t largest = 0;
    for (std::int64_t i = 0; i < Block; ++i) {
      largest = std::max(largest, magnitude_bits(values[block * Block + i]));
    }
    amax[block] = BF16{largest};
  }
}

DISTMOE_SIMD_CLONES void find_amax16(const BF16* values, std::int64_t num_blocks, BF16* amax) {
  find_block_amax<16>(values, num_blocks, amax);
}
DISTMOE_SIMD_CLONES void find_amax32(const BF16* values, std::int64_t num_blocks, BF16* amax) {
  find_block_amax<32>(values, num_blocks, amax);
}

}  // namespace

const BlockEncoders& plain_block_encoders() {
  static constexpr BlockEncoders kPlain = {
      encode_e4m3_blocks,   encode_e4m3_columns, encode_e4m3_rows, encode_e2m1_blocks16,
      encode_e2m1_blocks32, find_nvfp4_scales,   find_amax16,      find_amax32};
  return kPlain;
}

const BlockEncoders& block_encoders() {
  static const BlockEncoders* const fastest = [] {
    for (const BlockEncoders* encoders : {avx512_block_encoders(), avx2_block_encoders()}) {
      if (encoders != nullptr) return encoders;
    }
    return &plain_block_encoders();
  }();
  return *fastest;
}

}  // namespace distmoe
