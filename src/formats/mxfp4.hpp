// SPDX-License-Identifier: Apache-2.0
//
// MXFP4: blocks of 32 E2M1 codes along a row, 16 bytes each, with one E8M0 scale per block. An
// element is code * scale. E2M1 has no NaN: a block with a NaN or an infinity has scale byte 255
// and code 7 throughout.
#pragma once

#include <cstdint>

#include "formats/block_scaled.hpp"
#include "formats/block_scales.hpp"

namespace distmoe {

inline constexpr std::int64_t kMxfp4BlockBytes = 16;

using Mxfp4View = BlockScaledView<std::uint8_t, E8M0>;
using ConstMxfp4View = BlockScaledView<const std::uint8_t, const E8M0>;

void quantise_mxfp4(const BF16Rows& values, const Mxfp4View& out);

/// Exact for scale bytes up to kMxfp4MaxScaleByte; above, 2^128 and more becomes infinite.
void decode_mxfp4(const ConstMxfp4View& view, const DecodedRows<BF16>& out);
/// Exact.
void decode_mxfp4(const ConstMxfp4View& view, const DecodedRows<double>& out);

}  // namespace distmoe
