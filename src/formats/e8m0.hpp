// SPDX-License-Identifier: Apache-2.0
//
// E8M0: a power of two, 2^(byte - 127), as the scale of a block. It has no zero, no sign and no
// infinity; byte 255 is NaN.
#pragma once

#include <cstdint>

#include "formats/bit_cast.hpp"
#include "formats/host_device.hpp"

namespace distmoe {

/// One E8M0 scale, as it lies in memory.
struct E8M0 {
  std::uint8_t bits;
};
static_assert(sizeof(E8M0) == 1);

/// Exact. Byte 0 is 2^-127, a subnormal FP32 and not zero.
DISTMOE_HOST_DEVICE constexpr float to_float(E8M0 value) {
  if (value.bits == 0) return 0x1p-127f;
  if (value.bits == 255) return bit_cast<float>(0x7FC00000u);
  return bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 23);
}

/// The smallest scale that is at least `value`: 2^-127 for zero and whatever lies below it, 2^127
/// for what lies above. NaN, infinite and negative values give the NaN byte.
DISTMOE_HOST_DEVICE constexpr E8M0 to_e8m0_round_up(float value) {
  const auto bits = bit_cast<std::uint32_t>(value);
  if (bits == 0x80000000u) return E8M0{0};
  if (bits >= 0x7F800000u) return E8M0{255};
  if (bits <= bit_cast<std::uint32_t>(0x1p-127f)) return E8M0{0};
  const std::uint32_t exponent = (bits + 0x7FFFFFu) >> 23;
  return E8M0{static_cast<std::uint8_t>(exponent < 254 ? exponent : 254)};
}

/// 1 / scale, exact: 2^(127 - byte), which is subnormal for byte 254. NaN stays NaN.
DISTMOE_HOST_DEVICE constexpr float reciprocal(E8M0 scale) {
  return scale.bits == 255 ? to_float(scale)
                           : to_float(E8M0{static_cast<std::uint8_t>(254 - scale.bits)});
}

}  // namespace distmoe
