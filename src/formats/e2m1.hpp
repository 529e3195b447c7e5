// SPDX-License-Identifier: Apache-2.0
//
// E2M1: the 4-bit numbers +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}; no NaN and no infinity. Two lie in a
// byte, the even element in the low nibble.
#pragma once

#include <cstdint>

#include "formats/bit_cast.hpp"
#include "formats/host_device.hpp"

namespace distmoe {

/// One E2M1 number in the low four bits.
struct E2M1 {
  std::uint8_t bits;
};

inline constexpr float kE2M1Max = 6.0f;

/// The elements 2i and 2i + 1 of byte i.
DISTMOE_HOST_DEVICE constexpr E2M1 even_e2m1(std::uint8_t byte) {
  return E2M1{static_cast<std::uint8_t>(byte & 0xFu)};
}
DISTMOE_HOST_DEVICE constexpr E2M1 odd_e2m1(std::uint8_t byte) {
  return E2M1{static_cast<std::uint8_t>(byte >> 4)};
}
DISTMOE_HOST_DEVICE constexpr std::uint8_t pack_e2m1(E2M1 even, E2M1 odd) {
  return static_cast<std::uint8_t>((even.bits & 0xFu) | (odd.bits << 4));
}

/// Exact.
DISTMOE_HOST_DEVICE constexpr float to_float(E2M1 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 8u) << 28;
  const std::uint32_t magnitude = value.bits & 7u;
  const std::uint32_t bits =
      magnitude < 2 ? magnitude * bit_cast<std::uint32_t>(0.5f) : (magnitude << 22) + (126u << 23);
  return bit_cast<float>(sign | bits);
}

/// Round to nearest, ties to the even code, saturating at 6 of the value's sign; the sign of zero
/// is kept. The format has no NaN: NaN becomes code 7, and the NaN belongs in the block's scale.
DISTMOE_HOST_DEVICE constexpr E2M1 to_e2m1(float value) {
  const auto bits = bit_cast<std::uint32_t>(value);
  const float a = bit_cast<float>(bits & 0x7FFFFFFFu);
  if (a != a) return E2M1{7};
  const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) +
                   (a >= 3.5f) + (a > 5.0f);
  return E2M1{static_cast<std::uint8_t>(((bits >> 28) & 8u) | static_cast<std::uint32_t>(code))};
}

}  // namespace distmoe
