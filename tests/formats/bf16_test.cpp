// SPDX-License-Identifier: Apache-2.0
//
// Invariant: BF16 is the upper half of FP32, and rounding to it is to nearest, ties to even, once.
#include "formats/bf16.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace distmoe {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// The value of a finite code or, for the code of infinity, the value that rounding goes by: 2^128.
double value_of(std::uint32_t code) {
  const std::uint32_t exponent = code >> 7;
  const std::uint32_t fraction = code & 0x7Fu;
  if (exponent == 0) return std::ldexp(static_cast<double>(fraction), -133);
  return std::ldexp(static_cast<double>(fraction + 128), static_cast<int>(exponent) - 134);
}

/// Rounds by comparing with the midpoint of two neighbours, which is exact in FP64.
std::uint16_t rounded(double value) {
  const std::uint32_t sign = std::signbit(value) ? 0x8000u : 0;
  const double magnitude = std::fabs(value);
  std::uint32_t low = 0;
  std::uint32_t high = 0x7F80;
  if (magnitude >= value_of(high)) return static_cast<std::uint16_t>(sign | high);
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (value_of(middle) <= magnitude ? low : high) = middle;
  }
  const double midpoint = (value_of(low) + value_of(high)) / 2;
  const bool up = magnitude > midpoint || (magnitude == midpoint && low % 2 == 1);
  return static_cast<std::uint16_t>(sign | (up ? high : low));
}

TEST(BF16, DecodesEveryFiniteCode) {
  for (std::uint32_t code = 0; code < 0x7F80; ++code) {
    const auto positive = static_cast<std::uint16_t>(code);
    const auto negative = static_cast<std::uint16_t>(code | 0x8000u);
    ASSERT_EQ(static_cast<double>(to_float(BF16{positive})), value_of(code)) << code;
    ASSERT_EQ(static_cast<double>(to_float(BF16{negative})), -value_of(code)) << code;
    ASSERT_TRUE(std::signbit(to_float(BF16{negative}))) << code;
  }
  EXPECT_EQ(to_float(BF16{0x7F80}), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(to_float(BF16{0x7F81})));
}

TEST(BF16, RoundsEveryUpperHalfWithTheLowerHalvesThatDecide) {
  for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
    if ((upper & 0x7F80u) == 0x7F80u) continue;
    for (const std::uint32_t lower : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      const float value = std::bit_cast<float>(upper << 16 | lower);
      ASSERT_EQ(to_bf16(value).bits, rounded(value)) << std::hexfloat << value;
      ASSERT_EQ(to_bf16(static_cast<double>(value)).bits, rounded(value)) << std::hexfloat << value;
    }
  }
}

TEST(BF16, KeepsNaNAsAQuietNaNOfItsSign) {
  for (const std::uint32_t bits : {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0x7F80FFFFu}) {
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const BF16 code = to_bf16(std::bit_cast<float>(bits | sign));
      EXPECT_EQ(code.bits & 0x7FC0u, 0x7FC0u) << std::hex << bits;
      EXPECT_EQ(code.bits >> 15, sign >> 31) << std::hex << bits;
    }
  }
  EXPECT_TRUE(std::isnan(to_float(to_bf16(std::numeric_limits<double>::quiet_NaN()))));
}

TEST(BF16, KeepsInfinityAndTheSignOfZero) {
  EXPECT_EQ(to_bf16(kInfinity).bits, 0x7F80);
  EXPECT_EQ(to_bf16(-kInfinity).bits, 0xFF80);
  EXPECT_EQ(to_bf16(static_cast<float>(-kInfinity)).bits, 0xFF80);
  EXPECT_EQ(to_bf16(-0.0f).bits, 0x8000);
  EXPECT_EQ(to_bf16(-0.0).bits, 0x8000);
  EXPECT_EQ(to_bf16(1e300).bits, 0x7F80);
  EXPECT_EQ(to_bf16(-1e300).bits, 0xFF80);
}

// A value a hair beside a tie of two BF16 is no tie; FP32 in between would make it one.
TEST(BF16, RoundsAnFp64OnceAndNotThroughFp32) {
  for (std::uint32_t code = 0; code < 0x7F80; ++code) {
    const double tie = (value_of(code) + value_of(code + 1)) / 2;
    for (const double value : {std::nextafter(tie, 0.0), tie, std::nextafter(tie, kInfinity)}) {
      ASSERT_EQ(to_bf16(value).bits, rounded(value)) << std::hexfloat << value;
      ASSERT_EQ(to_bf16(-value).bits, rounded(-value)) << std::hexfloat << value;
    }
  }
  const double above_tie = 1.0 + 0x1p-8 + 0x1p-40;
  EXPECT_EQ(to_bf16(above_tie).bits, 0x3F81);
  EXPECT_EQ(to_bf16(static_cast<float>(above_tie)).bits, 0x3F80);
}

TEST(BF16, RoundsRandomFp64) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> fraction(1.0, 2.0);
  std::uniform_int_distribution<int> exponent(-160, 130);
  for (int i = 0; i < 200000; ++i) {
    const double value = std::ldexp(fraction(random), exponent(random));
    ASSERT_EQ(to_bf16(value).bits, rounded(value)) << std::hexfloat << value;
  }
}

}  // namespace
}  // namespace distmoe
