// SPDX-License-Identifier: Apache-2.0
//
// Invariant: E2M1 is +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}, all codes finite; encoding is to nearest, ties
// to even, and saturates at 6.
#include "formats/e2m1.hpp"

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

const std::vector<double> kValues = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};

// reports: A70
TEST(E2M1, DecodesEveryCodeToTheTable) {
  for (std::uint32_t code = 0; code < 8; ++code) {
    const float positive = to_float(E2M1{static_cast<std::uint8_t>(code)});
    const float negative = to_float(E2M1{static_cast<std::uint8_t>(code | 8u)});
    EXPECT_EQ(static_cast<double>(positive), kValues[code]);
    EXPECT_EQ(static_cast<double>(negative), -kValues[code]);
    EXPECT_FALSE(std::signbit(positive));
    EXPECT_TRUE(std::signbit(negative));
    EXPECT_EQ(to_e2m1(positive).bits, code);
    EXPECT_EQ(to_e2m1(negative).bits, code | 8u);
  }
}

TEST(E2M1, EncodesEveryBF16AsTheOracleDoes) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = to_float(BF16{static_cast<std::uint16_t>(bits)});
    if (std::isnan(value)) continue;
    const double magnitude = std::min(std::fabs(static_cast<double>(value)), 1e6);
    const std::uint32_t sign = std::signbit(value) ? 8 : 0;
    ASSERT_EQ(to_e2m1(value).bits, sign | testing::nearest_code(kValues, magnitude)) << value;
  }
}

TEST(E2M1, RoundsTiesToEvenAndTheirNeighboursToNearest) {
  for (std::uint32_t code = 0; code < 7; ++code) {
    const auto tie = static_cast<float>((kValues[code] + kValues[code + 1]) / 2);
    EXPECT_EQ(to_e2m1(tie).bits, code + code % 2) << tie;
    EXPECT_EQ(to_e2m1(-tie).bits, (code + code % 2) | 8u) << tie;
    EXPECT_EQ(to_e2m1(std::nextafter(tie, 0.0f)).bits, code) << tie;
    EXPECT_EQ(to_e2m1(std::nextafter(tie, 9.0f)).bits, code + 1) << tie;
  }
}

TEST(E2M1, SaturatesAndGivesCode7ForNaN) {
  EXPECT_EQ(to_e2m1(7.0f).bits, 7);
  EXPECT_EQ(to_e2m1(-1e30f).bits, 15);
  EXPECT_EQ(to_e2m1(INFINITY).bits, 7);
  EXPECT_EQ(to_e2m1(std::numeric_limits<float>::quiet_NaN()).bits, 7);
  EXPECT_EQ(to_e2m1(-std::numeric_limits<float>::quiet_NaN()).bits, 7);
}

TEST(E2M1, PacksTheEvenElementIntoTheLowNibble) {
  EXPECT_EQ(to_float(even_e2m1(0x21)), 0.5f);
  EXPECT_EQ(to_float(odd_e2m1(0x21)), 1.0f);
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    const auto packed = static_cast<std::uint8_t>(byte);
    EXPECT_EQ(pack_e2m1(even_e2m1(packed), odd_e2m1(packed)), packed);
  }
}

}  // namespace
}  // namespace distmoe
