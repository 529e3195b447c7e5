// SPDX-License-Identifier: Apache-2.0
//
// The block formats once more, slowly: FP64 throughout, rounded to FP32 where the definition says
// so, codes by looking at every value of the format. Shares nothing with src/formats but the raw
// 16 bits of BF16.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "formats/nearest_oracle.hpp"

namespace distmoe::testing {

/// Zero-padded values of a matrix, row-major, as raw BF16.
struct RawMatrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<std::uint16_t> bits;

  std::uint16_t at(std::int64_t row, std::int64_t col) const {
    return bits[static_cast<std::size_t>(row * cols + col)];
  }
};

/// One code a byte, also of 4-bit formats.
struct OracleBlocks {
  std::vector<std::uint8_t> codes;
  std::vector<std::uint8_t> scales;
  std::vector<float> factors;
};

inline double bf16_value(std::uint16_t bits) {
  const double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
  const int exponent = bits >> 7 & 0xFF;
  const int fraction = bits & 0x7F;
  if (exponent == 255) return fraction != 0 ? std::nan("") : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(fraction, -133);
  return sign * std::ldexp(128 + fraction, exponent - 134);
}

/// The finite non-negative values of E4M3, index = code.
inline const std::vector<double>& e4m3_values() {
  static const std::vector<double> values = [] {
    std::vector<double> list;
    for (int code = 0; code < 127; ++code) {
      const int exponent = code / 8;
      list.push_back(exponent == 0 ? std::ldexp(code, -9)
                                   : std::ldexp(8 + code % 8, exponent - 10));
    }
    return list;
  }();
  return values;
}
inline const std::vector<double>& e2m1_values() {
  static const std::vector<double> values = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
  return values;
}

/// NaN where one is NaN.
inline double oracle_amax(const RawMatrix& matrix, std::int64_t row_begin, std::int64_t row_end,
                          std::int64_t col_begin, std::int64_t col_end) {
  double amax = 0;
  for (std::int64_t row = row_begin; row < std::min(row_end, matrix.rows); ++row) {
    for (std::int64_t col = col_begin; col < std::min(col_end, matrix.cols); ++col) {
      const double magnitude = std::fabs(bf16_value(matrix.at(row, col)));
      if (std::isnan(magnitude)) return magnitude;
      amax = std::max(amax, magnitude);
    }
  }
  return amax;
}

inline std::uint8_t oracle_code(double value, const std::vector<double>& values,
                                std::uint32_t sign_bit) {
  const double magnitude = std::min(std::fabs(value), 2 * values.back());
  const std::uint32_t sign = std::signbit(value) ? sign_bit : 0;
  return static_cast<std::uint8_t>(sign | nearest_code(values, magnitude));
}

/// The smallest byte whose power of two is at least t, 255 for what is not finite.
inline std::uint8_t oracle_power_scale(double amax, float inverse_max) {
  if (!std::isfinite(amax)) return 255;
  const auto t = static_cast<double>(static_cast<float>(amax * static_cast<double>(inverse_max)));
  int byte = 0;
  while (std::ldexp(1.0, byte - 127) < t) ++byte;
  return static_cast<std::uint8_t>(byte);
}

/// MXFP8 (max 448) or MXFP4 (max 6) with blocks of block_rows x block_cols.
inline OracleBlocks oracle_mx(const RawMatrix& matrix, std::int64_t block_rows,
                              std::int64_t block_cols, const std::vector<double>& values,
                              std::uint32_t sign_bit) {
  const auto inverse_max = static_cast<float>(1.0 / values.back());
  OracleBlocks blocks;
  blocks.codes.resize(matrix.bits.size());
  for (std::int64_t row = 0; row < matrix.rows; row += block_rows) {
    for (std::int64_t col = 0; col < matrix.cols; col += block_cols) {
      const double amax = oracle_amax(matrix, row, row + block_rows, col, col + block_cols);
      const std::uint8_t scale = oracle_power_scale(amax, inverse_max);
      blocks.scales.push_back(scale);
      for (std::int64_t r = row; r < std::min(row + block_rows, matrix.rows); ++r) {
        for (std::int64_t c = col; c < std::min(col + block_cols, matrix.cols); ++c) {
          const double scaled = std::ldexp(bf16_value(matrix.at(r, c)), 127 - scale);
          blocks.codes[static_cast<std::size_t>(r * matrix.cols + c)] =
              scale == 255 ? static_cast<std::uint8_t>(sign_bit - 1)
                           : oracle_code(scaled, values, sign_bit);
        }
      }
    }
  }
  return blocks;
}
inline OracleBlocks oracle_mxfp8(const RawMatrix& matrix, std::int64_t block_rows,
                                 std::int64_t block_cols) {
  return oracle_mx(matrix, block_rows, block_cols, e4m3_values(), 0x80);
}
inline OracleBlocks oracle_mxfp4(const RawMatrix& matrix) {
  return oracle_mx(matrix, 1, 32, e2m1_values(), 8);
}

/// NVFP4 with a factor per `rows_per_factor` rows.
inline OracleBlocks oracle_nvfp4(const RawMatrix& matrix, std::int64_t rows_per_factor,
                                 float floor) {
  OracleBlocks blocks;
  blocks.codes.resize(matrix.bits.size());
  for (std::int64_t row = 0; row < matrix.rows; ++row) {
    const std::int64_t first = row - row % rows_per_factor;
    const double amax = oracle_amax(matrix, first, first + rows_per_factor, 0, matrix.cols);
    const bool is_poisoned = !std::isfinite(amax);
    const float factor = is_poisoned ? 1.0f : 2688.0f / std::max(static_cast<float>(amax), floor);
    if (row == first) blocks.factors.push_back(factor);
    for (std::int64_t col = 0; col < matrix.cols; col += 16) {
      const double block_amax = oracle_amax(matrix, row, row + 1, col, col + 16);
      const auto scaled = static_cast<float>(block_amax * static_cast<double>(factor));
      const auto sixth = static_cast<float>(static_cast<double>(scaled) *
                                            static_cast<double>(static_cast<float>(1.0 / 6.0)));
      const double clamped = std::clamp(static_cast<double>(sixth), std::ldexp(1.0, -9), 448.0);
      const std::uint8_t scale = is_poisoned ? 0x7F : oracle_code(clamped, e4m3_values(), 0x80);
      blocks.scales.push_back(scale);
      if (is_poisoned) {
        for (std::int64_t c = col; c < std::min(col + 16, matrix.cols); ++c) {
          blocks.codes[static_cast<std::size_t>(row * matrix.cols + c)] = 7;
        }
        continue;
      }
      const float multiplier = factor / static_cast<float>(e4m3_values()[scale]);
      for (std::int64_t c = col; c < std::min(col + 16, matrix.cols); ++c) {
        const double exact = bf16_value(matrix.at(row, c)) * static_cast<double>(multiplier);
        const auto rounded = static_cast<double>(static_cast<float>(exact));
        blocks.codes[static_cast<std::size_t>(row * matrix.cols + c)] =
            oracle_code(rounded, e2m1_values(), 8);
      }
    }
  }
  return blocks;
}

}  // namespace distmoe::testing
