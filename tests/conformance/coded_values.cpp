// SPDX-License-Identifier: Apache-2.0
#include "conformance/coded_values.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace distmoe::conformance {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// The values of codes without their sign, ascending.
std::vector<double> float_table(int fraction_bits, int bias, int count) {
  std::vector<double> values;
  for (int code = 0; code < count; ++code) {
    const int exponent = code >> fraction_bits;
    const double fraction =
        static_cast<double>(code & ((1 << fraction_bits) - 1)) / (1 << fraction_bits);
    values.push_back(exponent == 0 ? std::ldexp(fraction, 1 - bias)
                                   : std::ldexp(1.0 + fraction, exponent - bias));
  }
  return values;
}
const std::vector<double>& e4m3_table() {
  static const std::vector<double> table = float_table(3, 7, 127);  // 0x7F is NaN
  return table;
}
const std::vector<double>& e2m1_table() {
  static const std::vector<double> table{0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
  return table;
}

/// The code, with its sign, whose value is nearest; of two the even one.
std::uint8_t nearest(const std::vector<double>& table, double value, int sign_bit) {
  const double magnitude = std::abs(value);
  const auto above = std::ranges::lower_bound(table, magnitude);
  auto best = static_cast<std::size_t>(above - table.begin());
  if (above == table.end()) {
    --best;
  } else if (best > 0) {
    const double up = *above - magnitude;
    const double down = magnitude - table[best - 1];
    if (down < up || (down == up && best % 2 == 1)) --best;
  }
  return static_cast<std::uint8_t>(best | (std::signbit(value) ? 1U << sign_bit : 0U));
}

double value_of(const std::vector<double>& table, std::uint8_t code, int sign_bit) {
  const double magnitude = table[code & ((1U << sign_bit) - 1)];
  return (code >> sign_bit) != 0 ? -magnitude : magnitude;
}

/// Largest magnitude; NaN where there is any NaN.
class Amax {
 public:
  void add(double value) {
    if (std::isnan(value)) has_nan_ = true;
    amax_ = std::max(amax_, std::abs(value));
  }
  bool is_finite() const { return !has_nan_ && std::isfinite(amax_); }
  float get() const { return static_cast<float>(amax_); }

 private:
  double amax_ = 0.0;
  bool has_nan_ = false;
};

/// FP32 products and quotients, rounded once each: a double holds either exactly enough.
float product(float a, float b) {
  return static_cast<float>(static_cast<double>(a) * static_cast<double>(b));
}

/// The smallest power of two that is at least `least`, as its byte; 0 for whatever is small.
int power_of_two_byte(float least) {
  int byte = 0;
  while (byte < 254 && std::ldexp(1.0, byte - 127) < static_cast<double>(least)) ++byte;
  return byte;
}

template <typename Visit>
void for_each_block(MatrixShape shape, std::int64_t block_rows, std::int64_t block_columns,
                    const Visit& visit) {
  for (std::int64_t row = 0; row < shape.rows; row += block_rows) {
    for (std::int64_t column = 0; column < shape.columns; column += block_columns) {
      std::vector<std::size_t> elements;
      for (std::int64_t r = row; r < std::min(row + block_rows, shape.rows); ++r) {
        for (std::int64_t c = column; c < std::min(column + block_columns, shape.columns); ++c) {
          elements.push_back(static_cast<std::size_t>(r * shape.columns + c));
        }
      }
      visit(elements, row);
    }
  }
}

struct PowerScaled {
  const std::vector<double>& table;
  float inverse_max;
  int sign_bit;
  std::uint8_t nan_code;
};

CodedValues power_scaled(const std::vector<double>& matrix, MatrixShape shape,
                         std::int64_t block_rows, std::int64_t block_columns,
                         const PowerScaled& format) {
  CodedValues coded{.values = std::vector<double>(matrix.size()),
                    .codes = std::vector<std::uint8_t>(matrix.size())};
  for_each_block(
      shape, block_rows, block_columns, [&](const std::vector<std::size_t>& block, std::int64_t) {
        Amax amax;
        for (const std::size_t i : block) amax.add(matrix[i]);
        const int byte =
            amax.is_finite() ? power_of_two_byte(product(amax.get(), format.inverse_max)) : 255;
        coded.scales.push_back(static_cast<std::uint8_t>(byte));
        for (const std::size_t i : block) {
          coded.codes[i] = format.nan_code;
          coded.values[i] = kNaN;
          if (byte == 255) continue;
          coded.codes[i] =
              nearest(format.table, std::ldexp(matrix[i], 127 - byte), format.sign_bit);
          coded.values[i] =
              std::ldexp(value_of(format.table, coded.codes[i], format.sign_bit), byte - 127);
        }
      });
  return coded;
}

/// Rows that share one factor.
void nvfp4_group(const std::vector<double>& matrix, MatrixShape shape, std::int64_t first_row,
                 float floor, CodedValues& coded) {
  const auto begin = static_cast<std::size_t>(first_row * shape.columns);
  const std::size_t size = static_cast<std::size_t>(shape.rows * shape.columns);
  Amax amax;
  for (std::size_t i = begin; i < begin + size; ++i) amax.add(matrix[i]);
  const float factor =
      amax.is_finite()
          ? static_cast<float>(2688.0 / static_cast<double>(std::max(amax.get(), floor)))
          : 1.0F;
  coded.factors.push_back(factor);
  for_each_block(shape, 1, 16, [&](const std::vector<std::size_t>& block, std::int64_t) {
    Amax block_amax;
    for (const std::size_t i : block) block_amax.add(matrix[begin + i]);
    std::uint8_t scale = 0x7F;
    if (amax.is_finite()) {
      const float wanted = product(product(block_amax.get(), factor), 1.0F / 6.0F);
      scale = nearest(e4m3_table(),
                      std::clamp(static_cast<double>(wanted), std::ldexp(1.0, -9), 448.0), 7);
    }
    coded.scales.push_back(scale);
    for (const std::size_t i : block) {
      coded.codes[begin + i] = 7;
      coded.values[begin + i] = kNaN;
      if (scale == 0x7F) continue;
      const double step = value_of(e4m3_table(), scale, 7);
      const auto multiplier = static_cast<float>(static_cast<double>(factor) / step);
      coded.codes[begin + i] =
          nearest(e2m1_table(), product(static_cast<float>(matrix[begin + i]), multiplier), 3);
      coded.values[begin + i] =
          value_of(e2m1_table(), coded.codes[begin + i], 3) * step / static_cast<double>(factor);
    }
  });
}

}  // namespace

CodedValues mxfp8_values(const std::vector<double>& matrix, MatrixShape shape,
                         std::int64_t block_rows, std::int64_t block_columns) {
  return power_scaled(matrix, shape, block_rows, block_columns,
                      {e4m3_table(), 1.0F / 448.0F, 7, 0x7F});
}

CodedValues mxfp4_values(const std::vector<double>& matrix, MatrixShape shape) {
  return power_scaled(matrix, shape, 1, 32, {e2m1_table(), 1.0F / 6.0F, 3, 7});
}

CodedValues nvfp4_values(const std::vector<double>& matrix, MatrixShape shape, bool is_weight) {
  CodedValues coded{.values = std::vector<double>(matrix.size()),
                    .codes = std::vector<std::uint8_t>(matrix.size())};
  if (is_weight) {
    nvfp4_group(matrix, shape, 0, 1e-12F, coded);
    return coded;
  }
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    nvfp4_group(matrix, {1, shape.columns}, row, 1e-8F, coded);
  }
  return coded;
}

double e4m3_value(std::uint8_t code) {
  return (code & 0x7F) == 0x7F ? kNaN : value_of(e4m3_table(), code, 7);
}

double e2m1_value(std::uint8_t code) { return value_of(e2m1_table(), code, 3); }

std::vector<std::uint8_t> packed_pairs(const std::vector<std::uint8_t>& codes) {
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i + 1 < codes.size(); i += 2) {
    bytes.push_back(static_cast<std::uint8_t>(codes[i] | (codes[i + 1] << 4)));
  }
  return bytes;
}

}  // namespace distmoe::conformance
