// SPDX-License-Identifier: Apache-2.0
//
// Invariant: MXFP8 quantisers give the codes and scales of the slow oracle byte for byte, in every
// direction, for every value, stride and partial block, and write nothing else; decoding is the
// exact product.
#include "formats/mxfp8.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "distmoe/config.hpp"
#include "formats/expect_bytes.hpp"
#include "formats/raw_values.hpp"
#include "plan/layer_bytes.hpp"

namespace distmoe {
namespace {

using testing::OracleBlocks;
using testing::RawMatrix;
using testing::StridedRows;

struct Direction {
  const char* name;
  BlockShape shape;
  void (*quantise)(const BF16Rows&, const Mxfp8View&);
  std::int64_t block_rows;
  std::int64_t block_cols;
};

constexpr Direction kDirections[] = {
    {"rows", BlockShape::kRows, quantise_mxfp8_rows, 1, 32},
    {"columns", BlockShape::kColumns, quantise_mxfp8_columns, 32, 1},
    {"tiles", BlockShape::kTiles, quantise_mxfp8_tiles, 32, 32},
};

/// Quantises into memory with gaps between rows and checks every byte of it.
void expect_as_oracle(const RawMatrix& matrix, std::int64_t row_stride, std::int64_t num_padding,
                      const Direction& direction) {
  SCOPED_TRACE(::testing::Message()
               << direction.name << ' ' << matrix.rows << " x " << matrix.cols);
  const StridedRows values(matrix, row_stride, num_padding);
  const std::int64_t scale_rows = ceil_div(matrix.rows, direction.block_rows);
  const std::int64_t scale_cols = ceil_div(matrix.cols, direction.block_cols);
  testing::GappedBytes<E4M3> codes(matrix.rows, matrix.cols);
  testing::GappedBytes<E8M0> scales(scale_rows, scale_cols);
  direction.quantise(values.view(), {codes.data(), scales.data(), codes.stride(), scales.stride()});
  const OracleBlocks expected =
      testing::oracle_mxfp8(matrix, direction.block_rows, direction.block_cols);
  scales.expect(expected.scales, "scale");
  codes.expect(expected.codes, "code");
}

void expect_as_oracle_everywhere(const RawMatrix& matrix) {
  for (const Direction& direction : kDirections) {
    expect_as_oracle(matrix, matrix.cols, 0, direction);
  }
}

TEST(Mxfp8, QuantisesFiniteValuesAsTheOracleDoes) {
  for (std::uint32_t seed = 0; seed < 4; ++seed) {
    expect_as_oracle_everywhere(testing::finite_values(96, 320, seed));
  }
}

// reports: A39, A46, A47
TEST(Mxfp8, QuantisesPartialBlocksAtBothEdges) {
  for (const std::int64_t rows : {1, 5, 27, 31, 33, 44}) {
    for (const std::int64_t cols : {1, 15, 16, 31, 33, 48, 176, 257, 353}) {
      expect_as_oracle_everywhere(
          testing::finite_values(rows, cols, static_cast<std::uint32_t>(rows * cols)));
    }
  }
}

// reports: A37
TEST(Mxfp8, HonoursTheRowStride) {
  for (const Direction& direction : kDirections) {
    expect_as_oracle(testing::finite_values(64, 96, 5), 103, 0, direction);
    expect_as_oracle(testing::finite_values(45, 70, 6), 2 * 70, 0, direction);
  }
}

// The padding is no memory: under the address sanitizer reading it would show.
// reports: A39, A40, A43, A58
TEST(Mxfp8, QuantisesPaddingRowsAsZerosWithoutReadingThem) {
  for (const Direction& direction : kDirections) {
    for (const std::int64_t num_values : {0, 1, 5, 31, 32, 33, 100, 128}) {
      RawMatrix matrix = testing::poisoned_values(128, 64, 9, 400);
      std::fill(matrix.bits.begin() + num_values * 64, matrix.bits.end(), std::uint16_t{0});
      expect_as_oracle(matrix, 64, 128 - num_values, direction);
    }
  }
}

// reports: A62
TEST(Mxfp8, MarksBlocksWithNaNOrInfinityAndNoOthers) {
  for (const std::uint32_t every : {3000u, 300u, 20u, 1u}) {
    expect_as_oracle_everywhere(testing::poisoned_values(64, 320, every, every));
  }
}

/// 256 blocks, side by side, of the shape of `direction` (tiles cut to two rows). Block i is led by
/// the BF16 of bits first + i, at a place of its own, beside values from it down to 2^-15 of it.
RawMatrix led_blocks(const Direction& direction, std::uint32_t first) {
  const std::int64_t rows =
      direction.block_cols == 1 ? 32 : std::min<std::int64_t>(direction.block_rows, 2);
  RawMatrix matrix = testing::zeros(rows, 256 * direction.block_cols);
  const auto size = static_cast<std::uint32_t>(rows * direction.block_cols);
  for (std::uint32_t i = 0; i < matrix.bits.size(); ++i) {
    const auto col = static_cast<std::uint32_t>(i % matrix.cols);
    const auto width = static_cast<std::uint32_t>(direction.block_cols);
    const std::uint32_t lead = first + col / width;
    const std::uint32_t place = i / static_cast<std::uint32_t>(matrix.cols) * width + col % width;
    const std::uint32_t below = place * 16 / size;
    const std::uint32_t exponent = lead >> 7 & 0xFFu;
    const std::uint32_t other =
        (exponent > below ? exponent - below : 0) % 255 << 7 | (i * 37 & 0x7Fu);
    const std::uint32_t magnitude = std::min(other, lead & 0x7FFFu);
    matrix.bits[i] =
        static_cast<std::uint16_t>(place == lead * 7 % size ? lead : magnitude | (i & 4) << 13);
  }
  return matrix;
}

TEST(Mxfp8, QuantisesEveryBF16AsTheOracleDoesInEveryDirection) {
  for (const Direction& direction : kDirections) {
    for (std::uint32_t first = 0; first < 0x10000; first += 256) {
      const RawMatrix matrix = led_blocks(direction, first);
      ASSERT_NO_FATAL_FAILURE(expect_as_oracle(matrix, matrix.cols, 0, direction)) << first;
    }
  }
}

// reports: A65
TEST(Mxfp8, GivesZerosScaleByteZeroAndKeepsTheirSigns) {
  RawMatrix matrix = testing::zeros(1, 32);
  for (std::size_t i = 0; i < 32; i += 2) matrix.bits[i] = 0x8000;
  const StridedRows values(matrix, 32);
  std::vector<E4M3> codes(32);
  E8M0 scale{77};
  quantise_mxfp8_rows(values.view(), {codes.data(), &scale});
  EXPECT_EQ(scale.bits, 0);
  for (std::size_t i = 0; i < 32; ++i) EXPECT_EQ(codes[i].bits, i % 2 == 0 ? 0x80 : 0) << i;
}

// 448 * 2^n is a multiple of 1/448 that FP32 rounds to 2^n itself: it must not take the next scale.
TEST(Mxfp8, FillsTheRangeAtAnAmaxOf448) {
  for (int n = -126; n <= 119; ++n) {
    const BF16 edge = to_bf16(std::ldexp(448.0, n));
    const BF16 above{static_cast<std::uint16_t>(edge.bits + 1)};
    EXPECT_EQ(mxfp8_scale(to_float(edge)).bits, n + 127) << n;
    EXPECT_EQ(mxfp8_scale(to_float(above)).bits, n + 128) << n;
  }
  EXPECT_EQ(mxfp8_scale(to_float(BF16{1})).bits, 0);
  EXPECT_EQ(mxfp8_scale(to_float(BF16{0x7F7F})).bits, 247);
  EXPECT_EQ(mxfp8_scale(std::numeric_limits<float>::infinity()).bits, 255);
  EXPECT_EQ(mxfp8_scale(std::numeric_limits<float>::quiet_NaN()).bits, 255);
}

double exact(int code, int byte) {
  const double sign = code >= 128 ? -1.0 : 1.0;
  return sign *
         std::ldexp(testing::e4m3_values()[static_cast<std::size_t>(code % 128)], byte - 127);
}

/// Round to nearest even by comparing with the midpoint, in FP64; beyond the largest, infinity.
std::uint16_t nearest_bf16(double value) {
  std::uint16_t low = 0;
  std::uint16_t high = 0x7F80;
  const double magnitude = std::fabs(value);
  const auto finite = [](std::uint16_t bits) {
    return bits == 0x7F80 ? std::ldexp(1.0, 128) : testing::bf16_value(bits);
  };
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (magnitude >= finite(high)) return sign | high;
  while (high - low > 1) {
    const auto middle = static_cast<std::uint16_t>((low + high) / 2);
    (finite(middle) <= magnitude ? low : high) = middle;
  }
  const double midpoint = (finite(low) + finite(high)) / 2;
  const bool up = magnitude > midpoint || (magnitude == midpoint && low % 2 == 1);
  return static_cast<std::uint16_t>(sign | (up ? high : low));
}

// Scale bytes 0 to 2 round, 247 and above overflow to infinity, 255 is NaN.
TEST(Mxfp8, DecodesEveryCodeUnderEveryScale) {
  std::vector<E4M3> codes(256);
  for (std::uint32_t code = 0; code < 256; ++code)
    codes[code].bits = static_cast<std::uint8_t>(code);
  for (int byte = 0; byte < 256; ++byte) {
    const std::vector<E8M0> scales(256, E8M0{static_cast<std::uint8_t>(byte)});
    for (const BlockShape shape : {BlockShape::kRows, BlockShape::kColumns, BlockShape::kTiles}) {
      std::vector<BF16> narrow(256);
      std::vector<double> wide(256);
      const ConstMxfp8View view{codes.data(), scales.data(), 256, 256};
      decode_mxfp8(view, shape, DecodedRows<BF16>{narrow.data(), 1, 256, 256});
      decode_mxfp8(view, shape, DecodedRows<double>{wide.data(), 1, 256, 256});
      for (int code = 0; code < 256; ++code) {
        const auto i = static_cast<std::size_t>(code);
        if (byte == 255 || code % 128 == 127) {
          ASSERT_TRUE(std::isnan(to_float(narrow[i])) && std::isnan(wide[i]))
              << code << ' ' << byte;
          continue;
        }
        ASSERT_EQ(wide[i], exact(code, byte)) << code << ' ' << byte;
        ASSERT_EQ(narrow[i].bits, nearest_bf16(exact(code, byte))) << code << ' ' << byte;
        if (byte >= 3 && byte <= 246) {
          ASSERT_EQ(static_cast<double>(to_float(narrow[i])), wide[i]) << code << ' ' << byte;
        }
      }
    }
  }
}

TEST(Mxfp8, DecodesWithTheScaleOfEachBlock) {
  constexpr std::int64_t kRows = 70;
  constexpr std::int64_t kCols = 90;
  const RawMatrix matrix = testing::finite_values(kRows, kCols, 12);
  const StridedRows values(matrix, kCols);
  for (const Direction& direction : kDirections) {
    const OracleBlocks expected =
        testing::oracle_mxfp8(matrix, direction.block_rows, direction.block_cols);
    std::vector<std::byte> region(
        static_cast<std::size_t>(mxfp8_region_bytes(direction.shape, kRows, kCols)));
    const Mxfp8View view = mxfp8_region(region.data(), direction.shape, kRows, kCols);
    direction.quantise(values.view(), view);
    std::vector<double> wide(kRows * 100, 7.0);
    decode_mxfp8(view, direction.shape, DecodedRows<double>{wide.data(), kRows, kCols, 100});
    const std::int64_t scale_cols = ceil_div(kCols, direction.block_cols);
    for (std::int64_t row = 0; row < kRows; ++row) {
      for (std::int64_t col = 0; col < kCols; ++col) {
        const std::int64_t block =
            row / direction.block_rows * scale_cols + col / direction.block_cols;
        ASSERT_EQ(wide[static_cast<std::size_t>(row * 100 + col)],
                  exact(expected.codes[static_cast<std::size_t>(row * kCols + col)],
                        expected.scales[static_cast<std::size_t>(block)]))
            << direction.name << ' ' << row << ", " << col;
      }
      EXPECT_EQ(wide[static_cast<std::size_t>(row * 100 + kCols)], 7.0) << "wrote past the row";
    }
  }
}

// reports: A77: 64-bit addresses of codes and scales
TEST(Mxfp8, RegionsAreThoseOfThePlan) {
  const LayerBytes<> bytes{{.precision = Precision::kMXFP8}};
  for (const std::int64_t rows : {0, 128, 384, 1398102}) {
    for (const std::int64_t cols : {32, 2880, 7168}) {
      EXPECT_EQ(mxfp8_region_bytes(BlockShape::kRows, rows, cols), bytes.row(rows, cols));
      EXPECT_EQ(mxfp8_region_bytes(BlockShape::kColumns, rows, cols), bytes.col(rows, cols));
    }
  }
  EXPECT_EQ(mxfp8_region_bytes(BlockShape::kTiles, 64, 96), 64 * 96 + 128);
}

}  // namespace
}  // namespace distmoe
