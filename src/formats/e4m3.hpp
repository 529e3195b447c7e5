// SPDX-License-Identifier: Apache-2.0
//
// E4M3: 1 sign, 4 exponent (bias 7) and 3 fraction bits. The largest value is 448, the smallest
// 2^-9; only the codes 0x7F and 0xFF are NaN and nothing is infinite.
#pragma once

#include <cstdint>

#include "formats/bit_cast.hpp"
#include "formats/fp8.hpp"
#include "formats/host_device.hpp"

namespace distmoe {

/// One E4M3 number, as it lies in memory.
struct E4M3 {
  std::uint8_t bits;
};
static_assert(sizeof(E4M3) == 1);

inline constexpr float kE4M3Max = 448.0f;

/// Exact. Both NaN codes give a quiet NaN of their sign.
DISTMOE_HOST_DEVICE constexpr float to_float(E4M3 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x80u) << 24;
  const std::uint32_t magnitude = value.bits & 0x7Fu;
  if (magnitude == 0x7Fu) return bit_cast<float>(sign | 0x7FC00000u);
  return bit_cast<float>(sign | bit_cast<std::uint32_t>(Fp8<3, 7>::magnitude_of(magnitude)));
}

/// Round to nearest, ties to even, saturating: everything beyond 448, infinities included, becomes
/// 448 of its sign. NaN becomes the NaN code of its sign. The sign of zero is kept.
DISTMOE_HOST_DEVICE constexpr E4M3 to_e4m3(float value) {
  const auto bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  std::uint32_t code = 0;
  if (magnitude > 0x7F800000u) {
    code = 0x7Fu;
  } else if (magnitude >= bit_cast<std::uint32_t>(kE4M3Max)) {
    code = 0x7Eu;
  } else {
    code = Fp8<3, 7>::code_of(magnitude);
  }
  return E4M3{static_cast<std::uint8_t>(sign | code)};
}

}  // namespace distmoe
