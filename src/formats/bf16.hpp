// SPDX-License-Identifier: Apache-2.0
//
// BF16: 1 sign, 8 exponent and 7 fraction bits, the upper half of an FP32. Subnormals and the sign
// of zero are kept.
#pragma once

#include <bit>
#include <cstdint>

#include "formats/host_device.hpp"

namespace distmoe {

/// One BF16 number, as it lies in memory.
struct BF16 {
  std::uint16_t bits;
};
static_assert(sizeof(BF16) == 2);

/// Exact.
DISTMOE_HOST_DEVICE constexpr float to_float(BF16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

/// Round to nearest, ties to even; what rounds to 2^128 and above becomes infinite. A NaN stays a
/// NaN: its sign and upper payload bits are kept and it is made quiet.
DISTMOE_HOST_DEVICE constexpr BF16 to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
    return BF16{static_cast<std::uint16_t>((bits >> 16) | 0x0040u)};
  }
  const std::uint32_t round_up = 0x7FFFu + ((bits >> 16) & 1u);
  return BF16{static_cast<std::uint16_t>((bits + round_up) >> 16)};
}

}  // namespace distmoe
