// SPDX-License-Identifier: Apache-2.0
#include "formats/block_decoders.hpp"

#include "core/simd.hpp"
#include "formats/fp4_rows.hpp"

namespace distmoe {
namespace {

DISTMOE_SIMD_CLONES void decode_e4m3_blocks(const E4M3* codes, std::int64_t num_blocks,
                                            const E8M0* scales, BF16* out) {
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    const E8M0 scale = scales[block];
    for (std::int64_t i = 0; i < kMxfp8BlockSize; ++i) out[i] = decoded<BF16>(codes[i], scale);
    codes += kMxfp8BlockSize;
    out += kMxfp8BlockSize;
  }
}

DISTMOE_SIMD_CLONES void decode_e4m3_columns(const E4M3* codes, std::int64_t count,
                                             const E8M0* scales, BF16* out) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = decoded<BF16>(codes[i], scales[i]);
}

void decode_nvfp4_blocks(const std::uint8_t* codes, std::int64_t num_blocks, const E4M3* scales,
                         BF16* out) {
  decode_fp4_row<kNvfp4BlockSize>(codes, scales, num_blocks * kNvfp4BlockSize, out);
}
void decode_mxfp4_blocks(const std::uint8_t* codes, std::int64_t num_blocks, const E8M0* scales,
                         BF16* out) {
  decode_fp4_row<kMxfp4BlockSize>(codes, scales, num_blocks * kMxfp4BlockSize, out);
}

}  // namespace

const BlockDecoders& plain_block_decoders() {
  static constexpr BlockDecoders kPlain = {decode_e4m3_blocks, decode_e4m3_columns,
                                           decode_nvfp4_blocks, decode_mxfp4_blocks};
  return kPlain;
}

const BlockDecoders& block_decoders() {
  static const BlockDecoders* const fastest = [] {
    for (const BlockDecoders* decoders : {avx512_block_decoders(), avx2_block_decoders()}) {
      if (decoders != nullptr) return decoders;
    }
    return &plain_block_decoders();
  }();
  return *fastest;
}

}  // namespace distmoe
