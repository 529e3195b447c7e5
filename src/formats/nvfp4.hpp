// SPDX-License-Identifier: Apache-2.0
//
// NVFP4: blocks of 16 E2M1 codes along a row with one E4M3 scale per block, and one FP32 factor g
// per activation row or per expert. An element is code * scale / g; products are formed of code *
// scale, which is exact in BF16, and divided by g at the end. Where the amax of a row or an expert
// is NaN or infinite, all its scales are NaN (0x7F), its codes 7 and g = 1.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/block_scaled.hpp"
#include "formats/block_scales.hpp"

namespace distmoe {

using Nvfp4View = BlockScaledView<std::uint8_t, E4M3>;
using ConstNvfp4View = BlockScaledView<const std::uint8_t, const E4M3>;

/// Activations: every row has a factor of its own, factors[row].
void quantise_nvfp4_rows(const BF16Rows& values, const Nvfp4View& out, float* factors);
/// Weights: one factor, of the expert's amax (of gate and up together), which may be that of more
/// values than these. Returns it.
float quantise_nvfp4_expert(const BF16Rows& values, float expert_amax, const Nvfp4View& out);

/// code * scale, without the factor: exact.
void decode_nvfp4(const ConstNvfp4View& view, const DecodedRows<BF16>& out);
void decode_nvfp4(const ConstNvfp4View& view, const DecodedRows<double>& out);

/// Activation rows in a region of row(rows, cols) bytes (plan/layer_bytes.hpp): the codes, then at
/// the next multiple of 128 bytes the factors of all rows and behind them the scales.
struct Nvfp4Rows {
  Nvfp4View view;
  float* factors = nullptr;
};
Nvfp4Rows nvfp4_rows_region(std::byte* region, std::int64_t num_rows, std::int64_t num_cols);
/// Bytes of that region.
std::int64_t nvfp4_rows_region_bytes(std::int64_t num_rows, std::int64_t num_cols);

}  // namespace distmoe
