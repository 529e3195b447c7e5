// SPDX-License-Identifier: Apache-2.0
//
// Matrices of raw BF16 for the quantisers' tests: every magnitude, zeros of both signs, subnormals,
// and where asked NaN and infinities.
#pragma once

#include <cstdint>
#include <random>

#include "formats/bf16.hpp"
#include "formats/block_oracle.hpp"
#include "formats/block_scaled.hpp"

namespace distmoe::testing {

inline RawMatrix zeros(std::int64_t rows, std::int64_t cols) {
  return {rows, cols, std::vector<std::uint16_t>(static_cast<std::size_t>(rows * cols))};
}

class RandomNumbers {
 public:
  explicit RandomNumbers(std::uint32_t seed) : engine_(seed) {}
  std::uint32_t below(std::uint32_t limit) { return static_cast<std::uint32_t>(engine_() % limit); }

 private:
  std::mt19937 engine_;
};

/// Every stretch of 16 in a row has a magnitude of its own, three in four near 1 and the others
/// from subnormal to the largest; its elements lie up to 2^15 below. One stretch in eight is zero.
inline RawMatrix finite_values(std::int64_t rows, std::int64_t cols, std::uint32_t seed) {
  RandomNumbers random(seed);
  RawMatrix matrix = zeros(rows, cols);
  std::uint32_t top = 0;
  bool is_zero = false;
  for (std::size_t i = 0; i < matrix.bits.size(); ++i) {
    if (i % static_cast<std::size_t>(cols) % 16 == 0) {
      top = random.below(4) == 0 ? random.below(255) : 115 + random.below(24);
      is_zero = random.below(8) == 0;
    }
    const std::uint32_t lower = random.below(16);
    const std::uint32_t exponent = lower > top ? 0 : top - lower;
    const std::uint32_t bits = random.below(2) << 15 | exponent << 7 | random.below(128);
    matrix.bits[i] = static_cast<std::uint16_t>(is_zero ? bits & 0x8000u : bits);
  }
  return matrix;
}

/// The same with about one NaN or infinity in `every` elements.
inline RawMatrix poisoned_values(std::int64_t rows, std::int64_t cols, std::uint32_t seed,
                                 std::uint32_t every) {
  RawMatrix matrix = finite_values(rows, cols, seed);
  RandomNumbers random(seed + 1);
  constexpr std::uint16_t kPoison[] = {0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFFFF};
  for (std::uint16_t& bits : matrix.bits) {
    if (random.below(every) == 0) bits = kPoison[random.below(6)];
  }
  return matrix;
}

/// A matrix in memory with a row stride and NaN wherever no element lies.
class StridedRows {
 public:
  StridedRows(const RawMatrix& matrix, std::int64_t row_stride, std::int64_t num_padding_rows = 0)
      : matrix_(matrix), row_stride_(row_stride), num_padding_rows_(num_padding_rows) {
    const std::int64_t num_values = matrix.rows - num_padding_rows;
    memory_.resize(static_cast<std::size_t>(num_values * row_stride), BF16{0x7FC0});
    for (std::int64_t row = 0; row < num_values; ++row) {
      for (std::int64_t col = 0; col < matrix.cols; ++col) {
        memory_[static_cast<std::size_t>(row * row_stride + col)] = BF16{matrix.at(row, col)};
      }
    }
  }
  BF16Rows view() const {
    return {memory_.data(), matrix_.rows - num_padding_rows_, matrix_.cols, row_stride_,
            num_padding_rows_};
  }

 private:
  RawMatrix matrix_;
  std::int64_t row_stride_;
  std::int64_t num_padding_rows_;
  std::vector<BF16> memory_;
};

}  // namespace distmoe::testing
