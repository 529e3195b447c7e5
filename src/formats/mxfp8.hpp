// SPDX-License-Identifier: Apache-2.0
//
// MXFP8: E4M3 codes in blocks of 32 with one E8M0 scale each. An element is code * scale. Blocks
// with a NaN or an infinity have scale byte 255 and the NaN code throughout; zeros have scale byte
// 0. The functions run on the calling thread; rows, bands of 32 rows and slabs of columns may be
// quantised in any order and by any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/block_scaled.hpp"
#include "formats/block_scales.hpp"

namespace distmoe {

using Mxfp8View = BlockScaledView<E4M3, E8M0>;
using ConstMxfp8View = BlockScaledView<const E4M3, const E8M0>;

/// Blocks of 1 x 32: activations and gradients along the row, weights of inference.
void quantise_mxfp8_rows(const BF16Rows& values, const Mxfp8View& out);
/// Blocks of 32 x 1, counted from the first row: activations and gradients of one expert for WGRAD.
void quantise_mxfp8_columns(const BF16Rows& values, const Mxfp8View& out);
/// Blocks of 32 x 32: weights of training.
void quantise_mxfp8_tiles(const BF16Rows& values, const Mxfp8View& out);

/// Exact for scale bytes 3 to 246. Below, what is no multiple of 2^-133 rounds to nearest even;
/// above, 2^128 and more becomes infinite.
void decode_mxfp8(const ConstMxfp8View& view, BlockShape shape, const DecodedRows<BF16>& out);
/// Exact.
void decode_mxfp8(const ConstMxfp8View& view, BlockShape shape, const DecodedRows<double>& out);

/// Codes and scales in a region of row(rows, cols) or col(rows, cols) bytes (plan/layer_bytes.hpp),
/// or of tiles: the codes, then at the next multiple of 128 bytes the scales.
Mxfp8View mxfp8_region(std::byte* region, BlockShape shape, std::int64_t num_rows,
                       std::int64_t num_cols);
/// Bytes of that region.
std::int64_t mxfp8_region_bytes(BlockShape shape, std::int64_t num_rows, std::int64_t num_cols);

}  // namespace distmoe
