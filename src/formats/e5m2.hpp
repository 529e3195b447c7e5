// SPDX-License-Identifier: Apache-2.0
//
// E5M2: 1 sign, 5 exponent (bias 15) and 2 fraction bits, the upper half of an IEEE binary16. The
// largest finite value is 57344, the smallest 2^-16; 0x7C is infinite, 0x7D to 0x7F are NaN.
#pragma once

#include <cstdint>

#include "formats/bit_cast.hpp"
#include "formats/fp8.hpp"
#include "formats/host_device.hpp"

namespace distmoe {

/// One E5M2 number, as it lies in memory.
struct E5M2 {
  std::uint8_t bits;
};
static_assert(sizeof(E5M2) == 1);

inline constexpr float kE5M2Max = 57344.0f;

/// Exact. Every NaN code gives the quiet NaN of its sign.
DISTMOE_HOST_DEVICE constexpr float to_float(E5M2 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x80u) << 24;
  const std::uint32_t magnitude = value.bits & 0x7Fu;
  if (magnitude > 0x7Cu) return bit_cast<float>(sign | 0x7FC00000u);
  if (magnitude == 0x7Cu) return bit_cast<float>(sign | 0x7F800000u);
  return bit_cast<float>(sign | bit_cast<std::uint32_t>(Fp8<2, 15>::magnitude_of(magnitude)));
}

/// Round to nearest, ties to even, saturating: everything beyond 57344, infinities included,
/// becomes 57344 of its sign. NaN becomes code 0x7F with its sign. The sign of zero is kept.
DISTMOE_HOST_DEVICE constexpr E5M2 to_e5m2(float value) {
  const auto bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  std::uint32_t code = 0;
  if (magnitude > 0x7F800000u) {
    code = 0x7Fu;
  } else if (magnitude >= bit_cast<std::uint32_t>(kE5M2Max)) {
    code = 0x7Bu;
  } else {
    code = Fp8<2, 15>::code_of(magnitude);
  }
  return E5M2{static_cast<std::uint8_t>(sign | code)};
}

}  // namespace distmoe
