// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the codecs and the rules of block scales are one source. A kernel quantises and
// decodes a block of every format with them, as C++17 and without the compiler's leave to call what
// is the host's. The compiler is the test; the asserted codes are those of docs/formats.md.
#include "formats/block_scales.hpp"
#include "formats/e5m2.hpp"

namespace distmoe {

/// One block of `Size` values.
template <int Size>
struct Block {
  const BF16* values = nullptr;
  std::uint8_t* codes = nullptr;
  std::uint8_t* scale = nullptr;
  float* decoded = nullptr;
};

template <int Size>
__device__ float amax_of(const Block<Size>& block) {
  std::uint16_t largest = 0;
  for (int i = 0; i < Size; ++i) {
    const std::uint16_t magnitude = magnitude_bits(block.values[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return to_float(BF16{largest});
}

__global__ void mxfp8_block(const __grid_constant__ Block<kMxfp8BlockSize> block) {
  const E8M0 scale = mxfp8_scale(amax_of(block));
  *block.scale = scale.bits;
  for (int i = 0; i < kMxfp8BlockSize; ++i) {
    const E4M3 code = scale.bits == kE8M0NaN.bits
                          ? E4M3{kE4M3NaN.bits}
                          : to_e4m3(to_float(block.values[i]) * reciprocal(scale));
    block.codes[i] = code.bits;
    block.decoded[i] = to_float(code) * to_float(scale);
  }
}

__global__ void mxfp4_block(const __grid_constant__ Block<kMxfp4BlockSize> block) {
  const E8M0 scale = mxfp4_scale(amax_of(block));
  *block.scale = scale.bits;
  for (int i = 0; i < kMxfp4BlockSize; i += 2) {
    const E2M1 even = to_e2m1(to_float(block.values[i]) * reciprocal(scale));
    const E2M1 odd = to_e2m1(to_float(block.values[i + 1]) * reciprocal(scale));
    const std::uint8_t packed = pack_e2m1(even, odd);
    block.codes[i / 2] = packed;
    block.decoded[i] = to_float(even_e2m1(packed)) * to_float(scale);
    block.decoded[i + 1] = to_float(odd_e2m1(packed)) * to_float(scale);
  }
}

__global__ void nvfp4_block(const __grid_constant__ Block<kNvfp4BlockSize> block, float* factor) {
  const float amax = amax_of(block);
  *factor = nvfp4_factor(amax, kNvfp4RowFloor);
  const E4M3 scale = is_finite_amax(amax) ? nvfp4_scale(amax, *factor) : E4M3{kE4M3NaN.bits};
  const float multiplier = nvfp4_multiplier(*factor, scale);
  *block.scale = scale.bits;
  for (int i = 0; i < kNvfp4BlockSize; ++i) {
    const E2M1 code = to_e2m1(to_float(block.values[i]) * multiplier);
    block.codes[i] = code.bits;
    block.decoded[i] = to_float(code) * to_float(scale) / *factor;
  }
}

__global__ void convert(const float* from, std::uint8_t* e5m2, BF16* bf16) {
  e5m2[threadIdx.x] = to_e5m2(from[threadIdx.x]).bits;
  bf16[threadIdx.x] = to_bf16(to_float(E5M2{e5m2[threadIdx.x]}) + from[threadIdx.x]);
}

static_assert(mxfp8_scale(448.0f).bits == 0x7F && mxfp8_scale(450.0f).bits == 0x80);
static_assert(mxfp4_scale(7.0f).bits == 0x80 && mxfp4_scale(0.0f).bits == 0);
static_assert(to_e4m3(-2.0f).bits == 0xC0 && to_e4m3(0.3f).bits == 0x2A);
static_assert(nvfp4_factor(6.0f, kNvfp4RowFloor) == 448.0f);
static_assert(nvfp4_scale(6.0f, 448.0f).bits == 0x7E);
static_assert(pack_e2m1(to_e2m1(6.0f), to_e2m1(-3.0f)) == 0xD7);

}  // namespace distmoe
