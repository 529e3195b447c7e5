// SPDX-License-Identifier: Apache-2.0
//
// What the block quantisers read and write. A matrix has codes in its own row-major order and, in
// an array of its own, one scale per block:
//
//   rows      1 x 32 (NVFP4 1 x 16)          scales [rows, ceil(cols / block)]
//   columns   32 x 1, of one expert's rows   scales [ceil(rows / 32), cols]
//   tiles     32 x 32                        scales [ceil(rows / 32), ceil(cols / 32)]
//
// Blocks at the right and lower edge may be partial. 4-bit codes lie two in a byte along the row,
// the even element in the low nibble; the last byte of an odd row has a zero in the high one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "distmoe/block_shape.hpp"
#include "formats/bf16.hpp"

namespace distmoe {

/// Row-major values: row i begins at data + i * row_stride elements. Behind the rows in memory come
/// `num_padding_rows` rows of zeros that are in no memory; they are quantised as zeros are.
struct BF16Rows {
  const BF16* data = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t num_cols = 0;
  std::int64_t row_stride = 0;
  std::int64_t num_padding_rows = 0;
};

/// Codes and scales of one matrix; strides in bytes from one row of codes, or of scales, to the
/// next.
template <typename Code, typename Scale>
struct BlockScaledView {
  Code* codes = nullptr;
  Scale* scales = nullptr;
  std::int64_t code_stride = 0;
  std::int64_t scale_stride = 0;

  // NOLINTNEXTLINE(google-explicit-constructor): as T* becomes const T*.
  operator BlockScaledView<const Code, const Scale>() const {
    return {codes, scales, code_stride, scale_stride};
  }
};

/// Where decoded values go: row i at data + i * row_stride elements.
template <typename Value>
struct DecodedRows {
  Value* data = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t num_cols = 0;
  std::int64_t row_stride = 0;
};

/// code * scale: exact as double, and rounded once as BF16 (the product of these formats is exact
/// in FP32 up to 2^128).
template <typename Value, typename Code, typename Scale>
constexpr Value decoded(Code code, Scale scale) {
  if constexpr (std::is_same_v<Value, BF16>) {
    const float product = to_float(code) * to_float(scale);
    return product != product ? BF16{0x7FC0} : to_bf16(product);
  } else {
    return static_cast<Value>(to_float(code)) * static_cast<Value>(to_float(scale));
  }
}

/// The first of `count` scale bytes that is above `most`; `count` where none is.
std::int64_t find_scale_above(const std::uint8_t* scales, std::int64_t count, std::uint8_t most);

/// The largest magnitude; NaN where a value is NaN, infinite where one is infinite, 0 of nothing.
float amax_of(const BF16Rows& values);

}  // namespace distmoe
