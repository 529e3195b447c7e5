// SPDX-License-Identifier: Apache-2.0
#include "formats/fp8_blocks.hpp"

#include <algorithm>
#include <array>
#include <cstddef>

namespace distmoe {
namespace {

using DecodeTable = std::array<BF16, 256>;

/// A block has 16384 elements but 256 codes: the products are formed once. A product of 4 and 24
/// significant bits is exact in FP64.
DecodeTable make_table(float scale) {
  DecodeTable table{};
  for (std::size_t code = 0; code < table.size(); ++code) {
    const float value = to_float(E4M3{static_cast<std::uint8_t>(code)});
    table[code] = to_bf16(static_cast<double>(value) * static_cast<double>(scale));
  }
  return table;
}

}  // namespace

void decode_fp8_blocks(const E4M3* codes, const float* scales, std::int64_t rows, std::int64_t cols,
                       BF16* out) {
  for (std::int64_t row_begin = 0; row_begin < rows; row_begin += kFp8BlockSize) {
    const std::int64_t row_end = std::min(rows, row_begin + kFp8BlockSize);
    for (std::int64_t col_begin = 0; col_begin < cols; col_begin += kFp8BlockSize) {
      const std::int64_t col_end = std::min(cols, col_begin + kFp8BlockSize);
      const DecodeTable table = make_table(*scales++);
      for (std::int64_t row = row_begin; row < row_end; ++row) {
        for (std::int64_t col = col_begin; col < col_end; ++col) {
          out[row * cols + col] = table[codes[row * cols + col].bits];
        }
      }
    }
  }
}

}  // namespace distmoe
