// SPDX-License-Identifier: Apache-2.0
//
// A normal E4M3 has its exponent and fraction where a BF16 has them, 4 bits lower: a shift and one
// addition to the exponent give code * 2^n. The seven subnormals come from a table. Where a result
// would be subnormal or infinite, and under NaN scales, the plain loops do the work.
//
// E2M1 is looked up as the upper byte and the lower one of a BF16, and multiplied by its scale in
// FP32, exactly.
#include "formats/block_decoders.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#include "formats/avx2.hpp"

namespace distmoe {
namespace {

constexpr std::int64_t kLanes = 16;
/// Scale bytes under which every code but NaN and zero is a normal BF16.
constexpr std::uint8_t kMinScaleByte = 10;
constexpr std::uint8_t kMaxScaleByte = 246;

DISTMOE_AVX2 inline void store(BF16* place, __m256i value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(place), value);
}

// ---- E4M3

/// BF16 of the codes 0 to 7 under the scale 1: multiples of 2^-9.
DISTMOE_AVX2 inline __m256i subnormal_table() {
  return _mm256_broadcastsi128_si256(
      _mm_setr_epi16(0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60));
}

/// Zeros, subnormals and NaN: of each of them, with 1 added, the lower 7 bits are 8 at most.
DISTMOE_AVX2 inline bool are_all_normal(__m128i codes) {
  const __m128i next = _mm_add_epi8(codes, _mm_set1_epi8(1));
  const __m128i without_sign = _mm_add_epi8(next, next);
  const __m128i most = _mm_set1_epi8(2 * 8);
  const __m128i is_special = _mm_cmpeq_epi8(_mm_max_epu8(without_sign, most), most);
  return _mm_testz_si128(is_special, is_special) != 0;
}

/// Of codes that are normal. `shifts` has (scale byte - 127) << 7 in every lane.
DISTMOE_AVX2 inline __m256i decode_normal_e4m3(__m128i codes, __m256i shifts) {
  constexpr short kSignAndMagnitude = static_cast<short>(0x8000 | (0x7F << 4));
  const __m256i in_place = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 4),
                                            _mm256_set1_epi16(kSignAndMagnitude));
  return _mm256_add_epi16(in_place, _mm256_add_epi16(shifts, _mm256_set1_epi16(120 << 7)));
}

/// Of any codes.
DISTMOE_AVX2 inline __m256i decode_any_e4m3(__m128i codes, __m256i shifts) {
  const __m256i wide = _mm256_cvtepu8_epi16(codes);
  const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7F));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
  const __m256i normal =
      _mm256_add_epi16(_mm256_slli_epi16(magnitude, 4), _mm256_set1_epi16(120 << 7));
  const __m256i is_subnormal = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), magnitude);
  // Bytes 2m and 2m + 1 of the table.
  const __m256i places = _mm256_add_epi16(_mm256_mullo_epi16(magnitude, _mm256_set1_epi16(0x0202)),
                                          _mm256_set1_epi16(0x0100));
  const __m256i unscaled =
      _mm256_blendv_epi8(normal, _mm256_shuffle_epi8(subnormal_table(), places), is_subnormal);
  const __m256i is_zero = _mm256_cmpeq_epi16(magnitude, _mm256_setzero_si256());
  const __m256i finite = _mm256_andnot_si256(is_zero, _mm256_add_epi16(unscaled, shifts));
  const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7F));
  return _mm256_blendv_epi8(_mm256_or_si256(finite, sign), _mm256_set1_epi16(0x7FC0), is_nan);
}

DISTMOE_AVX2 inline __m256i decode_16(const E4M3* codes, __m256i shifts) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  return are_all_normal(bytes) ? decode_normal_e4m3(bytes, shifts) : decode_any_e4m3(bytes, shifts);
}

DISTMOE_AVX2 void decode_e4m3_blocks(const E4M3* codes, std::int64_t num_blocks, const E8M0* scales,
                                     BF16* out) {
  static_assert(kMxfp8BlockSize == 2 * kLanes);
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    const int byte = scales[block].bits;
    if (byte < kMinScaleByte || byte > kMaxScaleByte) {
      plain_block_decoders().e4m3_blocks(codes, 1, scales + block, out);
    } else {
      const __m256i shifts = _mm256_set1_epi16(static_cast<short>((byte - 127) * 128));
      store(out, decode_16(codes, shifts));
      store(out + kLanes, decode_16(codes + kLanes, shifts));
    }
    codes += kMxfp8BlockSize;
    out += kMxfp8BlockSize;
  }
}

DISTMOE_AVX2 void decode_e4m3_columns(const E4M3* codes, std::int64_t count, const E8M0* scales,
                                      BF16* out) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + i));
    const __m128i above = _mm_sub_epi8(bytes, _mm_set1_epi8(kMinScaleByte));
    const __m128i range = _mm_set1_epi8(static_cast<char>(kMaxScaleByte - kMinScaleByte));
    const __m128i is_legal = _mm_cmpeq_epi8(_mm_max_epu8(above, range), range);
    if (_mm_movemask_epi8(is_legal) != 0xFFFF) {
      plain_block_decoders().e4m3_columns(codes + i, kLanes, scales + i, out + i);
      continue;
    }
    const __m256i powers = _mm256_sub_epi16(_mm256_cvtepu8_epi16(bytes), _mm256_set1_epi16(127));
    store(out + i, decode_16(codes + i, _mm256_slli_epi16(powers, 7)));
  }
  plain_block_decoders().e4m3_columns(codes + i, count - i, scales + i, out + i);
}

// ---- E2M1

/// BF16 of 16 codes, two in each of the lower 8 bytes, times a scale that is finite.
DISTMOE_AVX2 inline __m256i decode_e2m1(__m128i bytes, __m256 scales) {
  const __m128i upper = _mm_setr_epi8(
      0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, static_cast<char>(0x80), static_cast<char>(0xBF),
      static_cast<char>(0xBF), static_cast<char>(0xBF), static_cast<char>(0xC0),
      static_cast<char>(0xC0), static_cast<char>(0xC0), static_cast<char>(0xC0));
  constexpr auto kHigh = static_cast<char>(0x80);
  constexpr auto kHigher = static_cast<char>(0xC0);
  const __m128i lower = _mm_setr_epi8(0, 0, kHigh, kHigher, 0, 0x40, kHigh, kHigher, 0, 0, kHigh,
                                      kHigher, 0, 0x40, kHigh, kHigher);
  const __m128i nibble = _mm_set1_epi8(0x0F);
  const __m128i places = _mm_unpacklo_epi8(_mm_and_si128(bytes, nibble),
                                           _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble));
  const __m128i low = _mm_shuffle_epi8(lower, places);
  const __m128i high = _mm_shuffle_epi8(upper, places);
  const __m256i values =
      _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
  const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(values, 16));
  const __m256 odd = _mm256_castsi256_ps(
      _mm256_and_si256(values, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))));
  const __m256i even_product =
      _mm256_srli_epi32(_mm256_castps_si256(_mm256_mul_ps(even, scales)), 16);
  return _mm256_blend_epi16(even_product, _mm256_castps_si256(_mm256_mul_ps(odd, scales)), 0xAA);
}

DISTMOE_AVX2 void decode_nvfp4_blocks(const std::uint8_t* codes, std::int64_t num_blocks,
                                      const E4M3* scales, BF16* out) {
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    if ((scales[block].bits & 0x7Fu) == kE4M3NaN.bits) {
      plain_block_decoders().nvfp4_blocks(codes + 8 * block, 1, scales + block, out + 16 * block);
      continue;
    }
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * block));
    store(out + 16 * block, decode_e2m1(bytes, _mm256_set1_ps(to_float(scales[block]))));
  }
}

DISTMOE_AVX2 void decode_mxfp4_blocks(const std::uint8_t* codes, std::int64_t num_blocks,
                                      const E8M0* scales, BF16* out) {
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    if (scales[block].bits > kMxfp4MaxScaleByte) {
      plain_block_decoders().mxfp4_blocks(codes + 16 * block, 1, scales + block, out + 32 * block);
      continue;
    }
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * block));
    const __m256 scale = _mm256_set1_ps(to_float(scales[block]));
    store(out + 32 * block, decode_e2m1(bytes, scale));
    store(out + 32 * block + 16, decode_e2m1(_mm_srli_si128(bytes, 8), scale));
  }
}

}  // namespace

const BlockDecoders* avx2_block_decoders() {
  static constexpr BlockDecoders kAvx2 = {decode_e4m3_blocks, decode_e4m3_columns,
                                          decode_nvfp4_blocks, decode_mxfp4_blocks};
  return has_avx2() ? &kAvx2 : nullptr;
}

}  // namespace distmoe

#else

namespace distmoe {

const BlockDecoders* avx2_block_decoders() { return nullptr; }

}  // namespace distmoe
#endif
