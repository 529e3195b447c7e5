// SPDX-License-Identifier: Apache-2.0
//
// The inner loops of the quantisers: the amax of blocks, and codes under known scales. The plain
// loops are the specification; those with AVX-512 and AVX2 give the same bits
// (tests/formats/block_encoders_test.cpp).
#pragma once

#include <cstdint>

#include "formats/block_scaled.hpp"
#include "formats/block_scales.hpp"

namespace distmoe {

/// Rows of values and where their codes go; strides in elements.
struct RowsToEncode {
  const BF16* values = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t num_rows = 0;
  E4M3* codes = nullptr;
  std::int64_t code_stride = 0;
  /// What is encoded afterwards: memory is asked for row i of it while row i is encoded.
  BF16Rows ahead{};
};

struct BlockEncoders {
  /// num_blocks blocks of 32 values, each with the scale of its block; the NaN code under byte 255.
  void (*e4m3_blocks)(const BF16* values, std::int64_t num_blocks, const E8M0* scales, E4M3* codes);
  /// Values that have a scale each; the NaN code under byte 255.
  void (*e4m3_columns)(const BF16* values, std::int64_t count, const E8M0* scales, E4M3* codes);
  /// The same of several rows that share the scales of their columns.
  void (*e4m3_rows)(const RowsToEncode& rows, std::int64_t num_cols, const E8M0* scales);
  /// num_blocks blocks of 16 values, times the multiplier of their block (|product| < 2^100), two
  /// codes in a byte.
  void (*e2m1_blocks16)(const BF16* values, std::int64_t num_blocks, const float* multipliers,
                        std::uint8_t* codes);
  /// The same of 32 values.
  void (*e2m1_blocks32)(const BF16* values, std::int64_t num_blocks, const float* multipliers,
                        std::uint8_t* codes);
  /// The scales of `count` blocks of NVFP4, of whose finite amax, and what their values are
  /// multiplied by.
  void (*nvfp4_scales)(const BF16* amax, std::int64_t count, float factor, E4M3* scales,
                       float* multipliers);
  /// The largest magnitude of each of num_blocks blocks of 16 values, as a BF16 without sign.
  void (*amax_blocks16)(const BF16* values, std::int64_t num_blocks, BF16* amax);
  /// The same of 32 values.
  void (*amax_blocks32)(const BF16* values, std::int64_t num_blocks, BF16* amax);
};

const BlockEncoders& plain_block_encoders();
/// Null where the compiler or the processor lacks AVX-512 (F, BW, VL), or AVX2 with FMA.
const BlockEncoders* avx512_block_encoders();
const BlockEncoders* avx2_block_encoders();
/// The fastest that run here.
const BlockEncoders& block_encoders();

}  // namespace distmoe
