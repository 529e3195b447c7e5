// SPDX-License-Identifier: Apache-2.0
//
// The rules that turn the largest magnitude of a block into its scale. Every product and quotient
// is one FP32 rounding; nothing flushes subnormals. An amax propagates NaN: the largest magnitude
// of a block with a NaN is NaN.
//
//   MXFP8   scale = smallest 2^n >= amax / 448            code = E4M3(x / scale)
//   MXFP4   scale = smallest 2^n >= amax / 6              code = E2M1(x / scale)
//   NVFP4   g     = 2688 / max(amax of the row or expert, floor)
//           scale = E4M3(clamp(amax * g / 6, 2^-9, 448))  code = E2M1(x * (g / scale))
#pragma once

#include <cstdint>

#include "formats/bf16.hpp"
#include "formats/bit_cast.hpp"
#include "formats/e2m1.hpp"
#include "formats/e4m3.hpp"
#include "formats/e8m0.hpp"
#include "formats/host_device.hpp"

namespace distmoe {

inline constexpr std::int64_t kMxfp8BlockSize = 32;
inline constexpr std::int64_t kMxfp4BlockSize = 32;
inline constexpr std::int64_t kNvfp4BlockSize = 16;

/// Codes of a block whose amax is NaN or infinite; its scale is NaN as well.
inline constexpr E4M3 kE4M3NaN{0x7F};
inline constexpr E2M1 kE2M1Poison{7};
inline constexpr E8M0 kE8M0NaN{255};

/// The largest byte that is the scale of a weight. Above lie NaN and, of NVFP4, what is negative,
/// which no quantiser makes; under a larger byte of MXFP4 6 * scale is beyond BF16.
inline constexpr std::uint8_t kMxfp8MaxScaleByte = 254;
inline constexpr std::uint8_t kMxfp4MaxScaleByte = 252;
inline constexpr std::uint8_t kNvfp4MaxScaleByte = 126;

/// Magnitude bits of BF16 order like the magnitudes, NaN above infinity: their maximum is the amax.
DISTMOE_HOST_DEVICE constexpr std::uint16_t magnitude_bits(BF16 value) {
  return static_cast<std::uint16_t>(value.bits & 0x7FFFu);
}
/// Neither NaN nor infinite.
DISTMOE_HOST_DEVICE constexpr bool is_finite_amax(float amax) {
  return bit_cast<std::uint32_t>(amax) < 0x7F800000u;
}

/// Byte 255 for an amax that is NaN or infinite.
DISTMOE_HOST_DEVICE constexpr E8M0 mxfp8_scale(float amax) {
  constexpr float kInverseMax = 1.0f / kE4M3Max;
  return to_e8m0_round_up(amax * kInverseMax);
}
DISTMOE_HOST_DEVICE constexpr E8M0 mxfp4_scale(float amax) {
  constexpr float kInverseMax = 1.0f / kE2M1Max;
  return to_e8m0_round_up(amax * kInverseMax);
}

/// The smallest amax that a global factor is computed from, so that zeros give a finite one.
inline constexpr float kNvfp4RowFloor = 1e-8f;
inline constexpr float kNvfp4ExpertFloor = 1e-12f;
/// The smallest scale of a block, that of blocks of zeros too.
inline constexpr float kNvfp4MinScale = 0x1p-9f;

/// The global factor of an activation row or of an expert's matrix; 1 where amax is NaN or
/// infinite.
DISTMOE_HOST_DEVICE constexpr float nvfp4_factor(float amax, float floor) {
  constexpr float kFullRange = kE2M1Max * kE4M3Max;
  if (!is_finite_amax(amax)) return 1.0f;
  return kFullRange / (amax > floor ? amax : floor);
}
/// The scale of a block in a row or expert whose amax is finite.
DISTMOE_HOST_DEVICE constexpr E4M3 nvfp4_scale(float block_amax, float factor) {
  constexpr float kInverseMax = 1.0f / kE2M1Max;
  const float scale = block_amax * factor * kInverseMax;
  return to_e4m3(scale > kNvfp4MinScale ? scale : kNvfp4MinScale);
}
/// What the elements of a block are multiplied by before they are rounded to E2M1.
DISTMOE_HOST_DEVICE constexpr float nvfp4_multiplier(float factor, E4M3 scale) {
  return factor / to_float(scale);
}

}  // namespace distmoe
