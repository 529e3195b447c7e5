// SPDX-License-Identifier: Apache-2.0
//
// BF16: 1 sign, 8 exponent and 7 fraction bits, the upper half of an FP32. Subnormals and the sign
// of zero are kept.
#pragma once

#include <cstdint>

#include "formats/bit_cast.hpp"
#include "formats/host_device.hpp"

namespace distmoe {

/// One BF16 number, as it lies in memory.
struct BF16 {
  std::uint16_t bits;
};
static_assert(sizeof(BF16) == 2);

/// Exact.
DISTMOE_HOST_DEVICE constexpr float to_float(BF16 value) {
  return bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

/// Round to nearest, ties to even; what rounds to 2^128 and above becomes infinite. A NaN stays a
/// NaN: its sign and upper payload bits are kept and it is made quiet.
DISTMOE_HOST_DEVICE constexpr BF16 to_bf16(float value) {
  const auto bits = bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
    return BF16{static_cast<std::uint16_t>((bits >> 16) | 0x0040u)};
  }
  const std::uint32_t round_up = 0x7FFFu + ((bits >> 16) & 1u);
  return BF16{static_cast<std::uint16_t>((bits + round_up) >> 16)};
}

/// The same, rounded once: going through FP32 would round twice, and the first rounding can make a
/// tie of what was none.
DISTMOE_HOST_DEVICE constexpr BF16 to_bf16(double value) {
  const auto nearest = static_cast<float>(value);
  auto bits = bit_cast<std::uint32_t>(nearest);
  const auto back = static_cast<double>(nearest);
  // Round to odd: of the two FP32 neighbours of an inexact value take the one with an odd last bit.
  // It lies on no BF16 value and on no midpoint, so that the second rounding is the only one.
  if (value == value && back != value && (bits & 1u) == 0) {
    const bool is_too_small = (back < 0 ? -back : back) < (value < 0 ? -value : value);
    bits += is_too_small ? 1u : ~0u;
  }
  return to_bf16(bit_cast<float>(bits));
}

}  // namespace distmoe
