// SPDX-License-Identifier: Apache-2.0
//
// Invariant: byte b of E8M0 is 2^(b - 127) for every b but 255, which is NaN; encoding never rounds
// down.
#include "formats/e8m0.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "formats/bf16.hpp"

namespace distmoe {
namespace {

// reports: A66, A70
TEST(E8M0, DecodesTheEdgesToWrittenOutValues) {
  EXPECT_FLOAT_EQ(to_float(E8M0{0}), 5.877471754e-39f);
  EXPECT_GT(to_float(E8M0{0}), 0.0f);
  EXPECT_EQ(to_float(E8M0{1}), 0x1p-126f);
  EXPECT_EQ(to_float(E8M0{126}), 0.5f);
  EXPECT_EQ(to_float(E8M0{127}), 1.0f);
  EXPECT_EQ(to_float(E8M0{128}), 2.0f);
  EXPECT_EQ(to_float(E8M0{254}), 0x1p127f);
  EXPECT_TRUE(std::isnan(to_float(E8M0{255})));
}

TEST(E8M0, InvertsEveryByteExactly) {
  for (int byte = 0; byte < 255; ++byte) {
    const float value = reciprocal(E8M0{static_cast<std::uint8_t>(byte)});
    EXPECT_EQ(static_cast<double>(value), std::ldexp(1.0, 127 - byte)) << byte;
  }
  EXPECT_TRUE(std::isnan(reciprocal(E8M0{255})));
}

// reports: A70
TEST(E8M0, DecodesEveryByteToItsPowerOfTwo) {
  for (int byte = 0; byte < 255; ++byte) {
    const float value = to_float(E8M0{static_cast<std::uint8_t>(byte)});
    EXPECT_EQ(static_cast<double>(value), std::ldexp(1.0, byte - 127)) << byte;
  }
}

TEST(E8M0, EncodesEveryBF16ToTheSmallestScaleThatIsNotBelow) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = to_float(BF16{static_cast<std::uint16_t>(bits)});
    const int byte = to_e8m0_round_up(value).bits;
    if (!std::isfinite(value) || value < 0) {
      ASSERT_EQ(byte, 255) << value;
    } else {
      int expected = 0;
      while (expected < 254 && std::ldexp(1.0, expected - 127) < static_cast<double>(value)) {
        ++expected;
      }
      ASSERT_EQ(byte, expected) << std::hexfloat << value;
    }
  }
}

TEST(E8M0, RoundsUpOneUlpAboveAPowerOfTwo) {
  for (int byte = 0; byte < 254; ++byte) {
    const float power = to_float(E8M0{static_cast<std::uint8_t>(byte)});
    EXPECT_EQ(to_e8m0_round_up(power).bits, byte);
    EXPECT_EQ(to_e8m0_round_up(std::nextafter(power, INFINITY)).bits, byte + 1);
    EXPECT_EQ(to_e8m0_round_up(std::nextafter(power, 0.0f)).bits, byte);
  }
  EXPECT_EQ(to_e8m0_round_up(-0.0f).bits, 0);
  EXPECT_EQ(to_e8m0_round_up(std::numeric_limits<float>::max()).bits, 254);
}

}  // namespace
}  // namespace distmoe
