// SPDX-License-Identifier: Apache-2.0
//
// Rows of E2M1 codes, two in a byte: what MXFP4 and NVFP4 share.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "formats/bf16.hpp"
#include "formats/block_scaled.hpp"
#include "formats/block_scales.hpp"
#include "formats/e2m1.hpp"

namespace distmoe {

/// Both nibbles of a byte of poisoned codes.
inline constexpr std::uint8_t kPoisonByte = pack_e2m1(kE2M1Poison, kE2M1Poison);

/// `count` elements times `multiplier`, rounded to E2M1 and packed: the rest of a row.
inline void encode_e2m1_rest(const BF16* values, std::int64_t count, float multiplier,
                             std::uint8_t* codes) {
  for (std::int64_t i = 0; i < count; i += 2) {
    const E2M1 even = to_e2m1(to_float(values[i]) * multiplier);
    const E2M1 odd = i + 1 < count ? to_e2m1(to_float(values[i + 1]) * multiplier) : E2M1{0};
    codes[i / 2] = pack_e2m1(even, odd);
  }
}

/// Code 7 for `count` elements.
inline void poison_e2m1(std::uint8_t* out, std::int64_t count) {
  std::fill_n(out, count / 2, kPoisonByte);
  if (count % 2 != 0) out[count / 2] = kE2M1Poison.bits;
}

/// Blocks of Block elements along the row: a table of 16 products serves a block.
template <std::int64_t Block, typename Scale, typename Value>
void decode_fp4_row(const std::uint8_t* bytes, const Scale* scales, std::int64_t num_cols,
                    Value* values) {
  for (std::int64_t begin = 0; begin < num_cols; begin += Block) {
    std::array<Value, 16> table{};
    for (std::uint8_t code = 0; code < 16; ++code) {
      table[code] = decoded<Value>(E2M1{code}, scales[begin / Block]);
    }
    const std::int64_t end = std::min(begin + Block, num_cols);
    for (std::int64_t col = begin; col < end; ++col) {
      const std::uint8_t byte = bytes[col / 2];
      values[col] = table[(col % 2 == 0 ? even_e2m1(byte) : odd_e2m1(byte)).bits];
    }
  }
}

/// `decode_blocks(codes, num_blocks, scales, out)` takes the whole blocks of a row.
template <std::int64_t Block, typename Scale, typename DecodeBlocks>
void decode_fp4_rows(const BlockScaledView<const std::uint8_t, const Scale>& view,
                     DecodeBlocks decode_blocks, const DecodedRows<BF16>& out) {
  const std::int64_t num_blocks = out.num_cols / Block;
  const std::int64_t whole = num_blocks * Block;
  for (std::int64_t row = 0; row < out.num_rows; ++row) {
    const std::uint8_t* codes = view.codes + row * view.code_stride;
    const Scale* scales = view.scales + row * view.scale_stride;
    BF16* values = out.data + row * out.row_stride;
    decode_blocks(codes, num_blocks, scales, values);
    decode_fp4_row<Block>(codes + whole / 2, scales + num_blocks, out.num_cols - whole,
                          values + whole);
  }
}

template <std::int64_t Block, typename Scale>
void decode_fp4_rows(const BlockScaledView<const std::uint8_t, const Scale>& view,
                     const DecodedRows<double>& out) {
  for (std::int64_t row = 0; row < out.num_rows; ++row) {
    decode_fp4_row<Block>(view.codes + row * view.code_stride,
                          view.scales + row * view.scale_stride, out.num_cols,
                          out.data + row * out.row_stride);
  }
}

}  // namespace distmoe
