// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "distmoe/block_shape.hpp"
#include "distmoe/config.hpp"
#include "distmoe/export.hpp"
#include "distmoe/tensor.hpp"

namespace distmoe {

/// A matrix [R, C] as codes with block scales, in host memory that the caller owns; all arrays are
/// contiguous. What activations, gradients and weights become in block-scaled contexts.
///
/// | format | blocks | codes | scales | factors |
/// | --- | --- | --- | --- | --- |
/// | MXFP8 | rows | f8_e4m3 [R, C] | f8_e8m0 [R, ceil(C / 32)] | |
/// | MXFP8 | columns | f8_e4m3 [R, C] | f8_e8m0 [ceil(R / 32), C] | |
/// | MXFP8 | tiles | f8_e4m3 [R, C] | f8_e8m0 [ceil(R / 32), ceil(C / 32)] | |
/// | MXFP4 | rows | uint8 [R, ceil(C / 2)] | f8_e8m0 [R, ceil(C / 32)] | |
/// | NVFP4 | rows | uint8 [R, ceil(C / 2)] | f8_e4m3 [R, ceil(C / 16)] | fp32 [R] |
///
/// Blocks at the right and lower edge may be partial. Two 4-bit codes lie in a byte, the even
/// element in the low nibble. An element is code * scale, in NVFP4 divided by its row's factor.
struct QuantisedMatrix {
  Precision format = Precision::kMXFP8;
  BlockShape blocks = BlockShape::kRows;
  TensorView codes = {};
  TensorView scales = {};
  TensorView factors = {};  ///< NVFP4 alone
};

/// The arrays of a matrix [num_rows, num_columns], without memory. Throws invalid_argument for a
/// format that is none of the three, blocks that it has not, and negative sizes.
DISTMOE_EXPORT QuantisedMatrix quantised_layout(Precision format, BlockShape blocks,
                                                std::int64_t num_rows, std::int64_t num_columns);

/// Quantises `values`, BF16 [R, C] in host memory whose rows may be apart, by the rules of
/// docs/formats.md, on the calling thread. Throws invalid_argument, before anything is written,
/// where a type, a shape or a place is another.
DISTMOE_EXPORT void quantise(const TensorView& values, const QuantisedMatrix& out);

/// The decoded values of `matrix`: FP32 [R, C], contiguous. Exact but for NVFP4, where the
/// quotient is rounded once. Throws as quantise() does, and out_of_memory for 32 decoded rows.
DISTMOE_EXPORT void dequantise(const QuantisedMatrix& matrix, const TensorView& values);

}  // namespace distmoe
