// SPDX-License-Identifier: Apache-2.0
//
// Invariant: E4M3 has 253 finite codes (two of them zeros), two NaN and no infinity; encoding is to
// nearest, ties to even, and saturates at 448.
#include "formats/e4m3.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "formats/bf16.hpp"
#include "formats/nearest_oracle.hpp"

namespace distmoe {
namespace {

// Codes 0x00 to 0x7E, written out. reports: A70
const std::vector<double> kValues = {
    0.0,      0.001953125, 0.00390625, 0.005859375, 0.0078125, 0.009765625, 0.01171875, 0.013671875,
    0.015625, 0.017578125, 0.01953125, 0.021484375, 0.0234375, 0.025390625, 0.02734375, 0.029296875,
    0.03125,  0.03515625,  0.0390625,  0.04296875,  0.046875,  0.05078125,  0.0546875,  0.05859375,
    0.0625,   0.0703125,   0.078125,   0.0859375,   0.09375,   0.1015625,   0.109375,   0.1171875,
    0.125,    0.140625,    0.15625,    0.171875,    0.1875,    0.203125,    0.21875,    0.234375,
    0.25,     0.28125,     0.3125,     0.34375,     0.375,     0.40625,     0.4375,     0.46875,
    0.5,      0.5625,      0.625,      0.6875,      0.75,      0.8125,      0.875,      0.9375,
    1.0,      1.125,       1.25,       1.375,       1.5,       1.625,       1.75,       1.875,
    2.0,      2.25,        2.5,        2.75,        3.0,       3.25,        3.5,        3.75,
    4.0,      4.5,         5.0,        5.5,         6.0,       6.5,         7.0,        7.5,
    8.0,      9.0,         10.0,       11.0,        12.0,      13.0,        14.0,       15.0,
    16.0,     18.0,        20.0,       22.0,        24.0,      26.0,        28.0,       30.0,
    32.0,     36.0,        40.0,       44.0,        48.0,      52.0,        56.0,       60.0,
    64.0,     72.0,        80.0,       88.0,        96.0,      104.0,       112.0,      120.0,
    128.0,    144.0,       160.0,      176.0,       192.0,     208.0,       224.0,      240.0,
    256.0,    288.0,       320.0,      352.0,       384.0,     416.0,       448.0,
};

std::uint8_t expected_code(float value) {
  const std::uint32_t sign = std::signbit(value) ? 0x80u : 0;
  if (std::isnan(value)) return static_cast<std::uint8_t>(sign | 0x7Fu);
  const double magnitude = std::min(std::fabs(static_cast<double>(value)), 1e6);
  return static_cast<std::uint8_t>(sign | testing::nearest_code(kValues, magnitude));
}

TEST(E4M3, DecodesEveryCodeToTheTable) {
  ASSERT_EQ(kValues.size(), 127u);
  for (std::uint32_t code = 0; code < 127; ++code) {
    const float positive = to_float(E4M3{static_cast<std::uint8_t>(code)});
    const float negative = to_float(E4M3{static_cast<std::uint8_t>(code | 0x80u)});
    EXPECT_EQ(static_cast<double>(positive), kValues[code]) << code;
    EXPECT_EQ(static_cast<double>(negative), -kValues[code]) << code;
    EXPECT_FALSE(std::signbit(positive)) << code;
    EXPECT_TRUE(std::signbit(negative)) << code;
  }
  EXPECT_TRUE(std::isnan(to_float(E4M3{0x7F})));
  EXPECT_TRUE(std::isnan(to_float(E4M3{0xFF})));
}

TEST(E4M3, EncodesWhatItDecodes) {
  for (std::uint32_t code = 0; code < 256; ++code) {
    const E4M3 value{static_cast<std::uint8_t>(code)};
    EXPECT_EQ(to_e4m3(to_float(value)).bits, code);
  }
}

TEST(E4M3, EncodesEveryBF16AsTheOracleDoes) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = to_float(BF16{static_cast<std::uint16_t>(bits)});
    ASSERT_EQ(to_e4m3(value).bits, expected_code(value)) << std::hexfloat << value;
  }
}

TEST(E4M3, RoundsTiesToEvenAndTheirNeighboursToNearest) {
  for (std::uint32_t code = 0; code + 1 < kValues.size(); ++code) {
    const auto tie = static_cast<float>((kValues[code] + kValues[code + 1]) / 2);
    const std::uint32_t even = code + code % 2;
    EXPECT_EQ(to_e4m3(tie).bits, even) << tie;
    EXPECT_EQ(to_e4m3(-tie).bits, even | 0x80u) << tie;
    EXPECT_EQ(to_e4m3(std::nextafter(tie, 0.0f)).bits, code) << tie;
    EXPECT_EQ(to_e4m3(std::nextafter(tie, 1e9f)).bits, code + 1) << tie;
  }
}

// reports: A68, A62
TEST(E4M3, SaturatesAt448AndKeepsNaN) {
  for (const float value : {447.f, 448.f, 463.f, 464.f, 465.f, 480.f, 1000.f, 1e30f, INFINITY}) {
    EXPECT_EQ(to_float(to_e4m3(value)), 448.0f) << value;
    EXPECT_EQ(to_float(to_e4m3(-value)), -448.0f) << value;
  }
  EXPECT_EQ(to_e4m3(std::numeric_limits<float>::quiet_NaN()).bits, 0x7F);
  EXPECT_EQ(to_e4m3(-std::numeric_limits<float>::quiet_NaN()).bits, 0xFF);
}

TEST(E4M3, KeepsSubnormalsAndTheSignOfZero) {
  EXPECT_EQ(to_e4m3(0x1p-9f).bits, 0x01);
  EXPECT_EQ(to_e4m3(0x1p-10f).bits, 0x00);
  EXPECT_EQ(to_e4m3(std::nextafter(0x1p-10f, 1.0f)).bits, 0x01);
  EXPECT_EQ(to_e4m3(-0.0f).bits, 0x80);
  EXPECT_EQ(to_e4m3(-0x1p-149f).bits, 0x80);
}

}  // namespace
}  // namespace distmoe
