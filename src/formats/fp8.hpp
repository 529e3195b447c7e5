// SPDX-License-Identifier: Apache-2.0
//
// What the 8-bit formats E4M3 and E5M2 share: a sign, then an exponent and a fraction that make the
// codes of finite numbers ascend with their magnitude.
#pragma once

#include <cstdint>

#include "formats/bit_cast.hpp"
#include "formats/host_device.hpp"

namespace distmoe {

template <int FractionBits, int Bias>
struct Fp8 {
  static constexpr int kDroppedBits = 23 - FractionBits;  ///< of an FP32 fraction
  static constexpr std::uint32_t kRebias = 127 - Bias;
  static constexpr std::uint32_t kFirstNormal = 1u << FractionBits;
  /// 2^n, as FP32.
  static constexpr DISTMOE_HOST_DEVICE float power_of_two(int n) {
    return bit_cast<float>(static_cast<std::uint32_t>(127 + n) << 23);
  }

  /// The finite number of a code without its sign; exact.
  static constexpr DISTMOE_HOST_DEVICE float magnitude_of(std::uint32_t code) {
    if (code < kFirstNormal) {
      return static_cast<float>(code) * power_of_two(1 - Bias - FractionBits);
    }
    return bit_cast<float>((code << kDroppedBits) + (kRebias << 23));
  }

  /// The code of a finite magnitude that is at most the largest: round to nearest, ties to even.
  static constexpr DISTMOE_HOST_DEVICE std::uint32_t code_of(std::uint32_t magnitude) {
    if (magnitude >= bit_cast<std::uint32_t>(power_of_two(1 - Bias))) {
      const std::uint32_t half = (1u << (kDroppedBits - 1)) - 1u;
      const std::uint32_t rounded = magnitude + half + ((magnitude >> kDroppedBits) & 1u);
      return (rounded >> kDroppedBits) - (kRebias << FractionBits);
    }
    // The last place of this power of two is the spacing of the subnormals: the addition rounds to
    // it.
    const float shift = power_of_two(24 - Bias - FractionBits);
    return bit_cast<std::uint32_t>(bit_cast<float>(magnitude) + shift) -
           bit_cast<std::uint32_t>(shift);
  }
};

}  // namespace distmoe
