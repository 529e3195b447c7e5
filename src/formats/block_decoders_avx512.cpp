// SPDX-License-Identifier: Apache-2.0
//
// A normal E4M3 has its exponent and fraction where a BF16 has them, 4 bits lower: a shift and one
// addition to the exponent give code * 2^n. Zeros, the seven subnormals and NaN, which have a way
// of their own, are one code in 10^4 of normal values. Where a result would be subnormal or
// infinite, and under NaN scales, the plain loops do the work.
//
// A block of E2M1 looks its codes up in a table of their 16 products.
#include "formats/block_decoders.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#include "formats/avx512.hpp"

namespace distmoe {
namespace {

constexpr std::int64_t kLanes = 32;
/// Scale bytes under which every code but NaN and zero is a normal BF16.
constexpr std::uint8_t kMinScaleByte = 10;
constexpr std::uint8_t kMaxScaleByte = 246;

/// BF16 of the codes 0 to 7 under the scale 1: multiples of 2^-9.
DISTMOE_AVX512 inline __m512i subnormal_table() {
  return _mm512_castsi128_si512(
      _mm_setr_epi16(0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60));
}

/// Zeros, subnormals and NaN: of each of them, with 1 added, the lower 7 bits are 8 at most.
DISTMOE_AVX512 inline bool are_all_normal(__m256i codes) {
  const __m256i next = _mm256_add_epi8(codes, _mm256_set1_epi8(1));
  const __m256i without_sign = _mm256_add_epi8(next, next);
  return _mm256_cmple_epu8_mask(without_sign, _mm256_set1_epi8(2 * 8)) == 0;
}

/// Of codes that are normal. `shifts` has (scale byte - 127) << 7 in every lane.
DISTMOE_AVX512 inline __m512i decode_normal_e4m3(__m256i codes, __m512i shifts) {
  constexpr short kSignAndMagnitude = static_cast<short>(0x8000 | (0x7F << 4));
  const __m512i in_place = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 4),
                                            _mm512_set1_epi16(kSignAndMagnitude));
  return _mm512_add_epi16(in_place, _mm512_add_epi16(shifts, _mm512_set1_epi16(120 << 7)));
}

/// Of any codes.
DISTMOE_AVX512 inline __m512i decode_any_e4m3(__m256i codes, __m512i shifts) {
  const __m512i wide = _mm512_cvtepu8_epi16(codes);
  const __m512i magnitude = _mm512_and_si512(wide, _mm512_set1_epi16(0x7F));
  const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x80)), 8);
  const __m512i normal =
      _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  const __mmask32 is_subnormal = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  const __m512i unscaled =
      _mm512_mask_permutexvar_epi16(normal, is_subnormal, magnitude, subnormal_table());
  const __mmask32 is_not_zero = _mm512_test_epi16_mask(magnitude, magnitude);
  const __m512i finite = _mm512_maskz_add_epi16(is_not_zero, unscaled, shifts);
  const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7F));
  return _mm512_mask_mov_epi16(_mm512_or_si512(finite, sign), is_nan, _mm512_set1_epi16(0x7FC0));
}

DISTMOE_AVX512 inline __m512i decode_e4m3(__m256i codes, __m512i shifts) {
  return are_all_normal(codes) ? decode_normal_e4m3(codes, shifts) : decode_any_e4m3(codes, shifts);
}

DISTMOE_AVX512 inline __m256i load_codes(const E4M3* codes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
}

DISTMOE_AVX512 void decode_e4m3_blocks(const E4M3* codes, std::int64_t num_blocks,
                                       const E8M0* scales, BF16* out) {
  static_assert(kMxfp8BlockSize == kLanes);
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    const int byte = scales[block].bits;
    if (byte < kMinScaleByte || byte > kMaxScaleByte) {
      plain_block_decoders().e4m3_blocks(codes, 1, scales + block, out);
    } else {
      const __m512i shifts = _mm512_set1_epi16(static_cast<short>((byte - 127) * 128));
      _mm512_storeu_si512(out, decode_e4m3(load_codes(codes), shifts));
    }
    codes += kLanes;
    out += kLanes;
  }
}

DISTMOE_AVX512 void decode_e4m3_columns(const E4M3* codes, std::int64_t count, const E8M0* scales,
                                        BF16* out) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + i));
    const __m256i above = _mm256_sub_epi8(bytes, _mm256_set1_epi8(kMinScaleByte));
    const __m256i range = _mm256_set1_epi8(static_cast<char>(kMaxScaleByte - kMinScaleByte));
    if (_mm256_cmpgt_epu8_mask(above, range) != 0) {
      plain_block_decoders().e4m3_columns(codes + i, kLanes, scales + i, out + i);
      continue;
    }
    const __m512i powers = _mm512_sub_epi16(_mm512_cvtepu8_epi16(bytes), _mm512_set1_epi16(127));
    _mm512_storeu_si512(out + i, decode_e4m3(load_codes(codes + i), _mm512_slli_epi16(powers, 7)));
  }
  plain_block_decoders().e4m3_columns(codes + i, count - i, scales + i, out + i);
}

/// The 16 products of E2M1 and a scale, which are exact.
DISTMOE_AVX512 inline __m256i product_table(float scale) {
  const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                       -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  const __m512 products = _mm512_mul_ps(values, _mm512_set1_ps(scale));
  const __m512i upper = _mm512_srli_epi32(_mm512_castps_si512(products), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(products, products, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(upper, is_nan, _mm512_set1_epi32(0x7FC0)));
}

/// The two codes of each byte, the even one first.
DISTMOE_AVX512 inline __m256i unpack(__m128i bytes) {
  const __m256i wide = _mm256_cvtepu8_epi16(bytes);
  return _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)),
                          _mm256_set1_epi16(0x0F0F));
}

DISTMOE_AVX512 void decode_nvfp4_blocks(const std::uint8_t* codes, std::int64_t num_blocks,
                                        const E4M3* scales, BF16* out) {
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    const __m256i table = product_table(to_float(scales[block]));
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * block));
    const __m256i places = _mm256_cvtepu8_epi16(_mm256_castsi256_si128(unpack(bytes)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * block),
                        _mm256_permutexvar_epi16(places, table));
  }
}

DISTMOE_AVX512 void decode_mxfp4_blocks(const std::uint8_t* codes, std::int64_t num_blocks,
                                        const E8M0* scales, BF16* out) {
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    const __m512i table = _mm512_castsi256_si512(product_table(to_float(scales[block])));
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * block));
    const __m512i places = _mm512_cvtepu8_epi16(unpack(bytes));
    _mm512_storeu_si512(out + 32 * block, _mm512_permutexvar_epi16(places, table));
  }
}

}  // namespace

const BlockDecoders* avx512_block_decoders() {
  static constexpr BlockDecoders kAvx512 = {decode_e4m3_blocks, decode_e4m3_columns,
                                            decode_nvfp4_blocks, decode_mxfp4_blocks};
  return has_avx512() ? &kAvx512 : nullptr;
}

}  // namespace distmoe

#else

namespace distmoe {

const BlockDecoders* avx512_block_decoders() { return nullptr; }

}  // namespace distmoe
#endif
