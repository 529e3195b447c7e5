// SPDX-License-Identifier: Apache-2.0
//
// Invariant: element i of an MXFP4 block is code * 2^(byte - 127), exact in BF16 for scale bytes 0
// to 252, the even element in the low nibble.
#include "formats/mxfp4.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

namespace distmoe {
namespace {

constexpr std::array<double, 16> kValues = {0.0,  0.5,  1.0,  1.5,  2.0,  3.0,  4.0,  6.0,
                                            -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0};

// reports: A129
TEST(Mxfp4, DecodesByte21WithScaleByte128ToOneAndTwo) {
  std::vector<std::uint8_t> block(16, 0x21);
  const E8M0 scale{128};
  std::vector<BF16> out(32, BF16{0x7FC0});
  decode_mxfp4(block.data(), &scale, 1, out.data());
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
    decode_mxfp4(block.data(), &scale, 1, out.data());
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
  decode_mxfp4(blocks.data(), scales.data(), 3, out.data());
  for (std::size_t i = 0; i < 96; ++i) {
    EXPECT_EQ(to_float(out[i]), i < 32 ? 1.0f : i < 64 ? 4.0f : 0.25f) << i;
  }
  EXPECT_EQ(out[96].bits, 0x7FC0) << "wrote past the last block";
}

}  // namespace
}  // namespace distmoe
