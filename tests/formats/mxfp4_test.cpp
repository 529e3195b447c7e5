// SPDX-License-Identifier: Apache-2.0
//
// Invariant: element i of an MXFP4 block is code * 2^(byte - 127), exact in BF16 for scale bytes 0
// to 252, the even element in the low nibble; the quantiser gives the bytes of the slow oracle.
#include "formats/mxfp4.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/checked_math.hpp"
#include "formats/expect_bytes.hpp"
#include "formats/raw_values.hpp"

namespace distmoe {
namespace {

constexpr std::array<double, 16> kValues = {0.0,  0.5,  1.0,  1.5,  2.0,  3.0,  4.0,  6.0,
                                            -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0};

// reports: A129
TEST(Mxfp4, DecodesByte21WithScaleByte128ToOneAndTwo) {
  std::vector<std::uint8_t> block(16, 0x21);
  const E8M0 scale{128};
  std::vector<BF16> out(32, BF16{0x7FC0});
  decode_mxfp4({block.data(), &scale}, DecodedRows<BF16>{out.data(), 1, 32});
  for (std::size_t i = 0; i < 32; i += 2) {
    EXPECT_EQ(to_float(out[i]), 1.0f);
    EXPECT_EQ(to_float(out[i + 1]), 2.0f);
  }
}

TEST(Mxfp4, DecodesEveryCodeUnderEveryLegalScaleExactly) {
  std::vector<std::uint8_t> block(16);
  for (std::uint32_t i = 0; i < 16; ++i) block[i] = static_cast<std::uint8_t>(i | (15 - i) << 4);
  for (int byte = 0; byte <= kMxfp4MaxScaleByte; ++byte) {
    const E8M0 scale{static_cast<std::uint8_t>(byte)};
    std::vector<BF16> out(32, BF16{0x7FC0});
    decode_mxfp4({block.data(), &scale}, DecodedRows<BF16>{out.data(), 1, 32});
    for (std::size_t i = 0; i < 16; ++i) {
      const float even = to_float(out[2 * i]);
      const float odd = to_float(out[2 * i + 1]);
      ASSERT_EQ(static_cast<double>(even), std::ldexp(kValues[i], byte - 127)) << byte;
      ASSERT_EQ(static_cast<double>(odd), std::ldexp(kValues[15 - i], byte - 127)) << byte;
      ASSERT_EQ(std::signbit(even), i >= 8) << byte;
    }
  }
}

TEST(Mxfp4, UsesTheScaleOfEachBlock) {
  std::vector<std::uint8_t> blocks(48, 0x22);
  const std::array<E8M0, 3> scales = {E8M0{127}, E8M0{129}, E8M0{125}};
  std::vector<BF16> out(97, BF16{0x7FC0});
  decode_mxfp4({blocks.data(), scales.data()}, DecodedRows<BF16>{out.data(), 1, 96});
  for (std::size_t i = 0; i < 96; ++i) {
    EXPECT_EQ(to_float(out[i]), i < 32 ? 1.0f : i < 64 ? 4.0f : 0.25f) << i;
  }
  EXPECT_EQ(out[96].bits, 0x7FC0) << "wrote past the last block";
}

/// Quantises into memory with gaps between rows and checks every byte of it.
void expect_as_oracle(const testing::RawMatrix& matrix, std::int64_t row_stride,
                      std::int64_t num_padding) {
  SCOPED_TRACE(::testing::Message() << matrix.rows << " x " << matrix.cols);
  const testing::StridedRows values(matrix, row_stride, num_padding);
  testing::GappedBytes<std::uint8_t> codes(matrix.rows, ceil_div(matrix.cols, 2));
  testing::GappedBytes<E8M0> scales(matrix.rows, ceil_div(matrix.cols, 32));
  quantise_mxfp4(values.view(), {codes.data(), scales.data(), codes.stride(), scales.stride()});
  const testing::OracleBlocks expected = testing::oracle_mxfp4(matrix);
  scales.expect(expected.scales, "scale");
  codes.expect(testing::packed(expected.codes, matrix.cols), "codes");
}

TEST(Mxfp4, QuantisesAsTheOracleDoes) {
  for (std::uint32_t seed = 0; seed < 6; ++seed) {
    expect_as_oracle(testing::finite_values(64, 320, seed), 320 + seed, 0);
  }
  for (const std::int64_t cols : {1, 2, 31, 32, 33, 63, 176, 353}) {
    testing::RawMatrix matrix = testing::finite_values(9, cols, static_cast<std::uint32_t>(cols));
    expect_as_oracle(matrix, cols, 0);
    std::fill(matrix.bits.begin() + 6 * cols, matrix.bits.end(), std::uint16_t{0});
    expect_as_oracle(matrix, cols, 3);
  }
}

// reports: A58, A62
TEST(Mxfp4, MarksBlocksWithNaNOrInfinityAndNoOthers) {
  for (const std::uint32_t every : {3000u, 300u, 20u, 1u}) {
    expect_as_oracle(testing::poisoned_values(32, 330, every, every), 330, 0);
  }
}

// Each BF16 leads a block of its own, beside values down to 2^-7 of it.
TEST(Mxfp4, QuantisesEveryBF16AsTheOracleDoes) {
  constexpr std::int64_t kCols = 32 * 256;
  for (std::uint32_t upper = 0; upper < 256; upper += 4) {
    testing::RawMatrix matrix = testing::zeros(4, kCols);
    for (std::uint32_t i = 0; i < matrix.bits.size(); ++i) {
      const std::uint32_t lead = (upper << 8) + i / 32;
      const std::uint32_t exponent = lead >> 7 & 0xFFu;
      const std::uint32_t below = i % 32 / 4;
      const std::uint32_t other = (exponent > below ? exponent - below : 0) % 255 << 7;
      matrix.bits[i] = static_cast<std::uint16_t>(i % 32 == 0 ? lead : other | (i * 37 & 0x807Fu));
    }
    expect_as_oracle(matrix, kCols, 0);
  }
}

TEST(Mxfp4, ScaleIsTheSmallestPowerOfTwoThatHoldsTheAmax) {
  EXPECT_EQ(mxfp4_scale(0.0f).bits, 0);
  EXPECT_EQ(mxfp4_scale(6.0f).bits, 127);
  EXPECT_EQ(mxfp4_scale(6.03125f).bits, 128);
  EXPECT_EQ(mxfp4_scale(to_float(BF16{0x7F7F})).bits, 253) << "the loader refuses such weights";
  EXPECT_EQ(mxfp4_scale(std::numeric_limits<float>::infinity()).bits, 255);
}

}  // namespace
}  // namespace distmoe
