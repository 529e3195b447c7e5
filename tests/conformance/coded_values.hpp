// SPDX-License-Identifier: Apache-2.0
//
// Block quantisation derived a second time, from the numerics contract alone: tables of values,
// nearest by comparison, scales by search. Shares nothing with src/formats, so that equal codes
// mean something.
#pragma once

#include <cstdint>
#include <vector>

namespace distmoe::conformance {

/// A quantised matrix [rows, columns]: what it decodes to, and its codes, one an element, and
/// scales, one a block, in row-major order.
struct CodedValues {
  std::vector<double> values{};
  std::vector<std::uint8_t> codes{};
  std::vector<std::uint8_t> scales{};
  std::vector<float> factors{};  ///< NVFP4: g of every row, or of the whole
};

struct MatrixShape {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

/// E4M3 with power-of-two scales of blocks of `block_rows` x `block_columns`.
CodedValues mxfp8_values(const std::vector<double>& matrix, MatrixShape shape,
                         std::int64_t block_rows, std::int64_t block_columns);
/// E2M1 in blocks of 1 x 32.
CodedValues mxfp4_values(const std::vector<double>& matrix, MatrixShape shape);
/// E2M1 in blocks of 1 x 16; values are divided by their factor. `is_weight`: one factor for all.
CodedValues nvfp4_values(const std::vector<double>& matrix, MatrixShape shape, bool is_weight);

/// What a code of E4M3, or of E2M1, stands for.
double e4m3_value(std::uint8_t code);
double e2m1_value(std::uint8_t code);

/// Two 4-bit codes a byte, the first in the low nibble.
std::vector<std::uint8_t> packed_pairs(const std::vector<std::uint8_t>& codes);

}  // namespace distmoe::conformance
