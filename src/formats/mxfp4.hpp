// SPDX-License-Identifier: Apache-2.0
//
// MXFP4: blocks of 32 E2M1 codes along a row, 16 bytes each, with one E8M0 scale per block.
#pragma once

#include <cstdint>

#include "formats/bf16.hpp"
#include "formats/e8m0.hpp"

namespace distmoe {

inline constexpr std::int64_t kMxfp4BlockSize = 32;
inline constexpr std::int64_t kMxfp4BlockBytes = 16;
/// With a larger scale byte 6 * scale is beyond BF16; a checkpoint that has one is refused.
inline constexpr std::uint8_t kMxfp4MaxScaleByte = 252;

/// Decodes `num_blocks` blocks of a row into 32 * num_blocks values, exactly. `blocks` has 16 bytes
/// a block; no scale byte may exceed kMxfp4MaxScaleByte.
void decode_mxfp4(const std::uint8_t* blocks, const E8M0* scales, std::int64_t num_blocks,
                  BF16* out);

}  // namespace distmoe
