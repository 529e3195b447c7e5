// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the NVFP4 quantisers give the codes, scales and factors of the slow oracle bit for
// bit, with a factor per row or per expert; a row or expert with a NaN or an infinity is poisoned
// as a whole and nothing else is.
#include "formats/nvfp4.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/checked_math.hpp"
#include "distmoe/config.hpp"
#include "formats/expect_bytes.hpp"
#include "formats/raw_values.hpp"
#include "plan/layer_bytes.hpp"

namespace distmoe {
namespace {

using testing::OracleBlocks;
using testing::RawMatrix;
using testing::StridedRows;

struct Quantised {
  explicit Quantised(const RawMatrix& matrix)
      : codes(matrix.rows, ceil_div(matrix.cols, 2)),
        scales(matrix.rows, ceil_div(matrix.cols, 16)),
        factors(static_cast<std::size_t>(matrix.rows)) {}
  Nvfp4View view() { return {codes.data(), scales.data(), codes.stride(), scales.stride()}; }

  testing::GappedBytes<std::uint8_t> codes;
  testing::GappedBytes<E4M3> scales;
  std::vector<float> factors;
};

void expect_equal(const Quantised& actual, const RawMatrix& matrix, const OracleBlocks& expected) {
  SCOPED_TRACE(::testing::Message() << matrix.rows << " x " << matrix.cols);
  actual.scales.expect(expected.scales, "scale");
  actual.codes.expect(testing::packed(expected.codes, matrix.cols), "codes");
}

void expect_rows_as_oracle(const RawMatrix& matrix, std::int64_t row_stride,
                           std::int64_t num_padding) {
  const StridedRows values(matrix, row_stride, num_padding);
  Quantised actual(matrix);
  quantise_nvfp4_rows(values.view(), actual.view(), actual.factors.data());
  const OracleBlocks expected = testing::oracle_nvfp4(matrix, 1, 1e-8f);
  EXPECT_EQ(actual.factors, expected.factors);
  expect_equal(actual, matrix, expected);
}

void expect_expert_as_oracle(const RawMatrix& matrix) {
  const StridedRows values(matrix, matrix.cols + 5);
  Quantised actual(matrix);
  const float factor = quantise_nvfp4_expert(values.view(), amax_of(values.view()), actual.view());
  const OracleBlocks expected = testing::oracle_nvfp4(matrix, matrix.rows, 1e-12f);
  EXPECT_EQ(factor, expected.factors[0]);
  expect_equal(actual, matrix, expected);
}

TEST(Nvfp4, QuantisesRowsAndExpertsAsTheOracleDoes) {
  for (std::uint32_t seed = 0; seed < 6; ++seed) {
    const RawMatrix matrix = testing::finite_values(64, 320, seed);
    expect_rows_as_oracle(matrix, 320, 0);
    expect_expert_as_oracle(matrix);
  }
}

/// More blocks than have their amax kept: found twice.
TEST(Nvfp4, QuantisesVeryWideRows) {
  for (const std::int64_t cols : {16384, 16385, 16400, 20000}) {
    const RawMatrix matrix = testing::finite_values(2, cols, static_cast<std::uint32_t>(cols));
    expect_rows_as_oracle(matrix, cols, 0);
  }
}

TEST(Nvfp4, QuantisesPartialBlocksAndOddRows) {
  for (const std::int64_t cols : {1, 2, 15, 16, 17, 31, 48, 63, 353}) {
    const RawMatrix matrix = testing::finite_values(9, cols, static_cast<std::uint32_t>(cols));
    expect_rows_as_oracle(matrix, cols + 1, 0);
    expect_expert_as_oracle(matrix);
  }
}

// reports: A63
TEST(Nvfp4, PoisonsTheRowOrTheExpertOfANaNOrInfinity) {
  for (const std::uint32_t every : {4000u, 500u, 1u}) {
    const RawMatrix matrix = testing::poisoned_values(40, 160, every, every);
    expect_rows_as_oracle(matrix, 160, 0);
    expect_expert_as_oracle(matrix);
  }
  for (const std::uint32_t bits : {0x7F80u, 0xFF80u, 0x7FC0u, 0xFF81u}) {
    RawMatrix matrix = testing::finite_values(3, 37, 1);
    matrix.bits[37 + 36] = static_cast<std::uint16_t>(bits);
    expect_rows_as_oracle(matrix, 37, 0);
    expect_expert_as_oracle(matrix);
  }
}

// reports: A43, A58
TEST(Nvfp4, QuantisesPaddingRowsAsZerosWithoutReadingThem) {
  for (const std::int64_t num_values : {0, 1, 127, 128}) {
    RawMatrix matrix = testing::poisoned_values(128, 48, 3, 900);
    std::fill(matrix.bits.begin() + num_values * 48, matrix.bits.end(), std::uint16_t{0});
    expect_rows_as_oracle(matrix, 48, 128 - num_values);
  }
}

// Every magnitude as the amax of a row, over values down to 2^-15 of it.
TEST(Nvfp4, QuantisesEveryRowAmaxAsTheOracleDoes) {
  constexpr std::uint32_t kCols = 48;
  for (std::uint32_t upper = 0; upper < 0x80; ++upper) {
    RawMatrix matrix = testing::zeros(256, kCols);
    for (std::uint32_t i = 0; i < matrix.bits.size(); ++i) {
      const std::uint32_t lead = (upper << 8) + i / kCols;
      const std::uint32_t below = i % kCols / 3;
      const std::uint32_t exponent = lead >> 7;
      const std::uint32_t other = (exponent > below ? exponent - below : 0) % 255 << 7;
      matrix.bits[i] =
          static_cast<std::uint16_t>(i % kCols == 20 ? lead : other | (i * 29 & 0x807Fu));
    }
    expect_rows_as_oracle(matrix, kCols, 0);
  }
}

// Every BF16, NaN and infinity too, as the amax of an expert, in another row and block each time.
TEST(Nvfp4, QuantisesEveryExpertAmaxAsTheOracleDoes) {
  constexpr std::uint32_t kCols = 24;
  RawMatrix matrix = testing::zeros(3, kCols);
  for (std::uint32_t lead = 0; lead < 0x10000; ++lead) {
    const std::uint32_t exponent = lead >> 7 & 0xFFu;
    for (std::uint32_t i = 0; i < matrix.bits.size(); ++i) {
      const std::uint32_t below = i / 5;
      const std::uint32_t other =
          (exponent > below ? exponent - below : 0) % 255 << 7 | (i * 29 & 0x7Fu);
      const std::uint32_t magnitude = std::min(other, lead & 0x7FFFu);
      matrix.bits[i] =
          static_cast<std::uint16_t>(i == lead % 72 ? lead : magnitude | (i & 2) << 14);
    }
    ASSERT_NO_FATAL_FAILURE(expect_expert_as_oracle(matrix)) << lead;
  }
}

// reports: A72
TEST(Nvfp4, GivesZerosAFiniteFactorAndZeroCodes) {
  const RawMatrix matrix = testing::zeros(2, 32);
  expect_rows_as_oracle(matrix, 32, 0);
  expect_expert_as_oracle(matrix);
  EXPECT_EQ(nvfp4_factor(0.0f, kNvfp4RowFloor), 2688.0f / 1e-8f);
  EXPECT_EQ(nvfp4_factor(0.0f, kNvfp4ExpertFloor), 2688.0f / 1e-12f);
  EXPECT_EQ(nvfp4_scale(0.0f, 2688.0f / 1e-8f).bits, 1);
}

// reports: A76: under a factor of its own the block with the row's amax keeps its range, 2688
// exactly; blocks of other amax clip where their scale is rounded down (docs/formats.md).
TEST(Nvfp4, AdaptsTheFactorSoThatTheBlockOfTheRowsAmaxIsNotClipped) {
  for (const float amax : {2688.0f, 3008.0f, 1e30f, 1e-30f}) {
    const float factor = nvfp4_factor(amax, 0.0f);
    EXPECT_EQ(to_float(nvfp4_scale(amax, factor)), 448.0f) << amax;
    EXPECT_EQ(to_e2m1(amax * nvfp4_multiplier(factor, nvfp4_scale(amax, factor))).bits, 7) << amax;
  }
  // 102 / 6 = 17 becomes 16, of which 6 is the most.
  EXPECT_EQ(to_float(nvfp4_scale(102.0f, 1.0f)), 16.0f);
  EXPECT_EQ(to_e2m1(102.0f * nvfp4_multiplier(1.0f, nvfp4_scale(102.0f, 1.0f))).bits, 7);
  EXPECT_EQ(nvfp4_factor(2688.0f, kNvfp4RowFloor), 1.0f);
  EXPECT_EQ(nvfp4_factor(std::numeric_limits<float>::infinity(), kNvfp4RowFloor), 1.0f);
  EXPECT_EQ(nvfp4_factor(std::numeric_limits<float>::quiet_NaN(), kNvfp4RowFloor), 1.0f);
}

TEST(Nvfp4, GateAndUpShareTheFactorOfTheLargerAmax) {
  RawMatrix gate = testing::zeros(1, 16);
  gate.bits.assign(16, 0x3F80);
  const StridedRows values(gate, 16);
  Quantised alone(gate);
  Quantised shared(gate);
  EXPECT_EQ(quantise_nvfp4_expert(values.view(), 1.0f, alone.view()), 2688.0f);
  EXPECT_EQ(quantise_nvfp4_expert(values.view(), 8.0f, shared.view()), 336.0f);
  EXPECT_EQ(to_float(*alone.scales.data()), 448.0f);
  EXPECT_EQ(to_float(*shared.scales.data()), 56.0f);
  EXPECT_EQ(*alone.codes.data(), 0x77);
  EXPECT_EQ(*shared.codes.data(), 0x77);
}

TEST(Nvfp4, DecodesEveryCodeUnderEveryScaleExactly) {
  std::vector<std::uint8_t> codes(8);
  for (std::uint32_t i = 0; i < 8; ++i)
    codes[i] = static_cast<std::uint8_t>(2 * i | (2 * i + 1) << 4);
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    const E4M3 scale{static_cast<std::uint8_t>(byte)};
    std::vector<BF16> narrow(16);
    std::vector<double> wide(16);
    decode_nvfp4({codes.data(), &scale}, DecodedRows<BF16>{narrow.data(), 1, 16});
    decode_nvfp4({codes.data(), &scale}, DecodedRows<double>{wide.data(), 1, 16});
    for (std::size_t code = 0; code < 16; ++code) {
      if (byte % 128 == 127) {
        ASSERT_TRUE(std::isnan(to_float(narrow[code])) && std::isnan(wide[code])) << byte;
        continue;
      }
      const double sign = (code >= 8) != (byte >= 128) ? -1.0 : 1.0;
      const double value =
          sign * testing::e2m1_values()[code % 8] * testing::e4m3_values()[byte % 128];
      ASSERT_EQ(wide[code], value) << code << ' ' << byte;
      ASSERT_EQ(static_cast<double>(to_float(narrow[code])), value) << code << ' ' << byte;
    }
  }
}

TEST(Nvfp4, RegionIsThatOfThePlan) {
  const LayerBytes<> bytes{{.precision = Precision::kNVFP4, .inference = true}};
  for (const std::int64_t rows : {0, 128, 1398144}) {
    for (const std::int64_t cols : {16, 2880, 7168}) {
      EXPECT_EQ(nvfp4_rows_region_bytes(rows, cols), bytes.row(rows, cols));
    }
  }
  alignas(128) std::byte region[2048] = {};
  const Nvfp4Rows rows = nvfp4_rows_region(region, 3, 17);
  EXPECT_EQ(reinterpret_cast<std::byte*>(rows.factors) - region, 128);
  EXPECT_EQ(reinterpret_cast<std::byte*>(rows.view.scales) - region, 128 + 3 * 4);
  EXPECT_EQ(rows.view.code_stride, 9);
  EXPECT_EQ(rows.view.scale_stride, 2);
}

}  // namespace
}  // namespace distmoe
