// SPDX-License-Identifier: Apache-2.0
//
// The inner loops of decoding to BF16. The plain loops are the specification; those with AVX-512
// and AVX2 give the same bits (tests/formats/block_decoders_test.cpp).
#pragma once

#include <cstdint>

#include "formats/block_scales.hpp"

namespace distmoe {

struct BlockDecoders {
  /// num_blocks blocks of 32 codes, each with the scale of its block.
  void (*e4m3_blocks)(const E4M3* codes, std::int64_t num_blocks, const E8M0* scales, BF16* out);
  /// Codes that have a scale each.
  void (*e4m3_columns)(const E4M3* codes, std::int64_t count, const E8M0* scales, BF16* out);
  /// num_blocks blocks of 16 codes, two in a byte.
  void (*nvfp4_blocks)(const std::uint8_t* codes, std::int64_t num_blocks, const E4M3* scales,
                       BF16* out);
  /// num_blocks blocks of 32 codes, two in a byte.
  void (*mxfp4_blocks)(const std::uint8_t* codes, std::int64_t num_blocks, const E8M0* scales,
                       BF16* out);
};

const BlockDecoders& plain_block_decoders();
/// Null where the compiler or the processor lacks AVX-512 (F, BW, VL), or AVX2 with FMA.
const BlockDecoders* avx512_block_decoders();
const BlockDecoders* avx2_block_decoders();
/// The fastest that run here.
const BlockDecoders& block_decoders();

}  // namespace distmoe
