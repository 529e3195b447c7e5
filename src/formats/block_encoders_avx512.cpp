// SPDX-License-Identifier: Apache-2.0
//
// E4M3 of a BF16 over a power of two needs no floating point. With c = exponent field of the scale
// - 7, a value of exponent field x and 8-bit significand m is m / 2^s in units of its E4M3 binade's
// spacing, s = max(4, 5 + c - x), and its code is RNE(m / 2^s) + 8 * (s - (5 + c - x)): 32 values
// in 16-bit lanes. A code that rounds up into the next binade or out of the subnormals is right as
// it is.
//
// E2M1 and the E4M3 of NVFP4's scales round in FP32. With B the power of two of the value's binade
// (of the first normal number's below it), B * 2^n is added, n so that the sum's last place is the
// spacing of codes in that binade. The sum's low half is then the value in that spacing and its
// high half says the binade, both of which count codes. What is added has an even number of last
// places besides, which makes the two start from a multiple of 256.
#include "formats/block_encoders.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#include <algorithm>

#include "formats/avx512.hpp"

namespace distmoe {
namespace {

constexpr std::int64_t kLanes = 32;
/// The smallest scale byte that encode_e4m3() is right for.
constexpr std::uint8_t kMinScaleByte = 20;

/// a | (b & mask), in one instruction.
DISTMOE_AVX512 inline __m512i or_and(__m512i a, __m512i b, short mask) {
  return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi16(mask), 0xF8);
}

/// Scale bytes in 16-bit lanes as encode_e4m3() wants them: 5 + c.
DISTMOE_AVX512 inline __m512i scale_lanes(__m512i bytes) {
  return _mm512_sub_epi16(bytes, _mm512_set1_epi16(2));
}

DISTMOE_AVX512 inline __m256i encode_e4m3(__m512i values, __m512i scales) {
  const __m512i magnitude = _mm512_and_si512(values, _mm512_set1_epi16(0x7FFF));
  const __m512i significand = _mm512_or_si512(_mm512_and_si512(magnitude, _mm512_set1_epi16(0x7F)),
                                              _mm512_set1_epi16(0x80));
  const __m512i below = _mm512_sub_epi16(scales, _mm512_srli_epi16(magnitude, 7));
  const __m512i shift = _mm512_max_epi16(below, _mm512_set1_epi16(4));
  // 2^(s - 1) - 1; counts beyond the lane give 0.
  const __m512i half =
      _mm512_srlv_epi16(_mm512_set1_epi16(-1), _mm512_sub_epi16(_mm512_set1_epi16(17), shift));
  const __m512i odd = _mm512_and_si512(_mm512_srlv_epi16(significand, shift), _mm512_set1_epi16(1));
  const __m512i rounded =
      _mm512_srlv_epi16(_mm512_add_epi16(_mm512_add_epi16(significand, half), odd), shift);
  const __m512i binade = _mm512_slli_epi16(_mm512_sub_epi16(shift, below), 3);
  const __m512i code = _mm512_min_epu16(_mm512_add_epi16(rounded, binade), _mm512_set1_epi16(0x7E));
  return _mm512_cvtepi16_epi8(or_and(code, _mm512_srli_epi16(values, 8), 0x80));
}

DISTMOE_AVX512 void encode_e4m3_blocks(const BF16* values, std::int64_t num_blocks,
                                       const E8M0* scales, E4M3* codes) {
  static_assert(kMxfp8BlockSize == kLanes);
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    const E8M0 scale = scales[block];
    if (scale.bits < kMinScaleByte) {
      plain_block_encoders().e4m3_blocks(values, 1, &scale, codes);
      values += kLanes;
      codes += kLanes;
      continue;
    }
    const __m256i finite =
        encode_e4m3(_mm512_loadu_si512(values), scale_lanes(_mm512_set1_epi16(scale.bits)));
    const __m256i nan = _mm256_set1_epi8(static_cast<char>(kE4M3NaN.bits));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes),
                        scale.bits == kE8M0NaN.bits ? nan : finite);
    values += kLanes;
    codes += kLanes;
  }
}

DISTMOE_AVX512 void encode_e4m3_columns(const BF16* values, std::int64_t count, const E8M0* scales,
                                        E4M3* codes) {
  const __m256i nan_scale = _mm256_set1_epi8(static_cast<char>(kE8M0NaN.bits));
  const __m256i nan_code = _mm256_set1_epi8(static_cast<char>(kE4M3NaN.bits));
  const __m256i min_scale = _mm256_set1_epi8(static_cast<char>(kMinScaleByte));
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + i));
    const __m512i narrow = _mm512_loadu_si512(values + i);
    const __mmask32 is_small = _mm256_cmplt_epu8_mask(bytes, min_scale);
    if (_mm512_mask_test_epi16_mask(is_small, narrow, _mm512_set1_epi16(0x7FFF)) != 0) {
      plain_block_encoders().e4m3_columns(values + i, kLanes, scales + i, codes + i);
      continue;
    }
    // What is left under small scales is zeros, which have only a sign.
    const __m256i scaled = encode_e4m3(narrow, scale_lanes(_mm512_cvtepu8_epi16(bytes)));
    const __m256i finite = _mm256_mask_blend_epi8(
        is_small, scaled, _mm256_and_si256(scaled, _mm256_set1_epi8(static_cast<char>(0x80))));
    const __mmask32 is_nan = _mm256_cmpeq_epi8_mask(bytes, nan_scale);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i),
                        _mm256_mask_blend_epi8(is_nan, finite, nan_code));
  }
  plain_block_encoders().e4m3_columns(values + i, count - i, scales + i, codes + i);
}

/// Whether encode_e4m3() is right for all scales and none is NaN.
DISTMOE_AVX512 bool are_all_ordinary(const E8M0* scales, std::int64_t count) {
  __mmask32 is_special = 0;
  for (std::int64_t i = 0; i + kLanes <= count; i += kLanes) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + i));
    // Modulo 256 the ordinary bytes minus the smallest are below those of NaN and of small scales.
    const __m256i above = _mm256_sub_epi8(bytes, _mm256_set1_epi8(kMinScaleByte));
    is_special |= _mm256_cmpge_epu8_mask(
        above, _mm256_set1_epi8(static_cast<char>(kE8M0NaN.bits - kMinScaleByte)));
  }
  return is_special == 0;
}

/// Rows are walked from begin to end, as memory likes to be written.
DISTMOE_AVX512 void encode_e4m3_rows(const RowsToEncode& rows, std::int64_t num_cols,
                                     const E8M0* scales) {
  const bool is_ordinary = are_all_ordinary(scales, num_cols);
  for (std::int64_t row = 0; row < rows.num_rows; ++row) {
    const BF16* values = rows.values + row * rows.row_stride;
    E4M3* codes = rows.codes + row * rows.code_stride;
    const bool has_ahead = row < rows.ahead.num_rows;
    const BF16* ahead = has_ahead ? rows.ahead.data + row * rows.ahead.row_stride : nullptr;
    const std::int64_t num_ahead = has_ahead ? rows.ahead.num_cols : 0;
    std::int64_t col = 0;
    for (; is_ordinary && col + kLanes <= num_cols; col += kLanes) {
      if (col < num_ahead) __builtin_prefetch(ahead + col);
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + col));
      _mm256_storeu_si256(
          reinterpret_cast<__m256i*>(codes + col),
          encode_e4m3(_mm512_loadu_si512(values + col), scale_lanes(_mm512_cvtepu8_epi16(bytes))));
    }
    encode_e4m3_columns(values + col, num_cols - col, scales + col, codes + col);
  }
}

/// Counts of codes start from this.
constexpr int kFirstCode = 512;

/// B * 2^22, whose last place is B / 2, two codes a binade. Exponent field 127 + 22 counts 298.
constexpr float kE2M1Shift = 0x1p22f + (kFirstCode - 2 * (127 + 22)) / 2.0f;

/// The values, at least 0 and below 2^100, rounded. In the low half codes that exceed those in the
/// exponent, in the high half 64 times those.
DISTMOE_AVX512 inline __m512i round_to_e2m1(__m512 values) {
  const __m512 at_least = _mm512_max_ps(values, _mm512_set1_ps(1.0f));
  const __m512i binade =
      _mm512_and_si512(_mm512_castps_si512(at_least), _mm512_set1_epi32(0x7F800000));
  return _mm512_castps_si512(
      _mm512_fmadd_ps(_mm512_castsi512_ps(binade), _mm512_set1_ps(kE2M1Shift), values));
}

/// 16 bytes of the codes of 32 values; lane 0 to 7 of `multipliers` belong to the first 16.
DISTMOE_AVX512 inline __m128i encode_e2m1(const BF16* values, __m512 multipliers) {
  const __m512i narrow = _mm512_loadu_si512(values);
  const __m512i even =
      _mm512_and_si512(_mm512_slli_epi32(narrow, 16), _mm512_set1_epi32(0x7FFFFFFF));
  const __m512i odd = _mm512_and_si512(narrow, _mm512_set1_epi32(0x7FFF0000));
  const __m512i even_sum = round_to_e2m1(_mm512_mul_ps(_mm512_castsi512_ps(even), multipliers));
  const __m512i odd_sum = round_to_e2m1(_mm512_mul_ps(_mm512_castsi512_ps(odd), multipliers));
  // 64 * (kFirstCode + code) in 16-bit lanes: 64 times a sum's low half plus its high half.
  const __m512i of_even = _mm512_madd_epi16(even_sum, _mm512_set1_epi32(1 << 16 | 64));
  const __m512i of_both =
      _mm512_mask_add_epi16(of_even, 0xAAAAAAAA, odd_sum, _mm512_slli_epi32(odd_sum, 22));
  const __m512i code =
      _mm512_min_epu16(of_both, _mm512_set1_epi16(static_cast<short>(64 * (kFirstCode + 7))));
  const __m512i signed_code = or_and(code, _mm512_srli_epi16(narrow, 6), 8 * 64);
  // The even code times 1 plus the odd one times 16.
  const __m512i pairs = _mm512_madd_epi16(signed_code, _mm512_set1_epi32(16 << 16 | 1));
  return _mm512_cvtepi32_epi8(_mm512_srli_epi32(pairs, 6));
}

DISTMOE_AVX512 void encode_e2m1_blocks16(const BF16* values, std::int64_t num_blocks,
                                         const float* multipliers, std::uint8_t* codes) {
  std::int64_t block = 0;
  for (; block + 2 <= num_blocks; block += 2) {
    const __m512 both = _mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(multipliers[block]),
                                             _mm512_set1_ps(multipliers[block + 1]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), encode_e2m1(values, both));
    values += 32;
    codes += 16;
  }
  if (block < num_blocks) {
    plain_block_encoders().e2m1_blocks16(values, 1, multipliers + block, codes);
  }
}

DISTMOE_AVX512 void encode_e2m1_blocks32(const BF16* values, std::int64_t num_blocks,
                                         const float* multipliers, std::uint8_t* codes) {
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes),
                     encode_e2m1(values, _mm512_set1_ps(multipliers[block])));
    values += 32;
    codes += 16;
  }
}

/// B * 2^20, whose last place is B / 8, eight codes a binade. Exponent field 127 + 20 counts 8 of
/// them, less those of the exponents that E4M3 lacks.
constexpr float kE4M3Shift = 0x1p20f + (5 * 256 - 8 * (127 + 20 - 6)) / 8.0f;

DISTMOE_AVX512 void find_nvfp4_scales(const BF16* amax, std::int64_t count, float factor,
                                      E4M3* scales, float* multipliers) {
  const __m512 factors = _mm512_set1_ps(factor);
  for (std::int64_t i = 0; i < count; i += 16) {
    const auto lanes = static_cast<__mmask16>((1u << std::min<std::int64_t>(16, count - i)) - 1u);
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, amax + i));
    const __m512 largest = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    const __m512 exact = _mm512_mul_ps(_mm512_mul_ps(largest, factors), _mm512_set1_ps(1.0f / 6));
    const __m512 scale = _mm512_min_ps(_mm512_max_ps(exact, _mm512_set1_ps(kNvfp4MinScale)),
                                       _mm512_set1_ps(kE4M3Max));
    const __m512i at_least = _mm512_castps_si512(_mm512_max_ps(scale, _mm512_set1_ps(0x1p-6f)));
    const __m512 binade =
        _mm512_castsi512_ps(_mm512_and_si512(at_least, _mm512_set1_epi32(0x7F800000)));
    const __m512 sum = _mm512_fmadd_ps(binade, _mm512_set1_ps(kE4M3Shift), scale);
    const __m512 rounded = _mm512_fnmadd_ps(binade, _mm512_set1_ps(kE4M3Shift), sum);
    const __m512i bits = _mm512_castps_si512(sum);
    _mm512_mask_cvtepi32_storeu_epi8(scales + i, lanes,
                                     _mm512_add_epi32(bits, _mm512_srli_epi32(bits, 20)));
    _mm512_mask_storeu_ps(multipliers + i, lanes, _mm512_div_ps(factors, rounded));
  }
}

/// The largest of 8 lanes of 16 bits, at most 0x7FFF each.
DISTMOE_AVX512 inline std::uint16_t largest_of(__m128i lanes) {
  const __m128i all = _mm_set1_epi16(-1);
  return static_cast<std::uint16_t>(
      ~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(lanes, all)), 0));
}

DISTMOE_AVX512 inline __m128i fold(__m256i lanes) {
  return _mm_max_epu16(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
}

/// Maxima of neighbours: of the 128-bit lanes 2i and 2i + 1 of both.
DISTMOE_AVX512 inline __m512i fold_lanes(__m512i a, __m512i b) {
  return _mm512_max_epu16(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD));
}

/// Magnitudes of 32 values.
DISTMOE_AVX512 inline __m512i load_magnitudes(const BF16* values) {
  return _mm512_and_si512(_mm512_loadu_si512(values), _mm512_set1_epi16(0x7FFF));
}

/// A lane of 128 bits for each of 4 blocks of 16 values, which holds the largest somewhere.
DISTMOE_AVX512 inline __m512i fold_blocks(const BF16* values) {
  return fold_lanes(load_magnitudes(values), load_magnitudes(values + kLanes));
}

/// The largest of each of 16 blocks of 16 values: 16 lanes of 128 bits are folded in halves.
DISTMOE_AVX512 inline __m256i find_16_amax16(const BF16* values) {
  __m512i quarters[2];
  for (int half = 0; half < 2; ++half) {
    const __m512i a = fold_blocks(values + 128 * half);
    const __m512i b = fold_blocks(values + 128 * half + 64);
    quarters[half] = _mm512_max_epu16(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  const __m512 a = _mm512_castsi512_ps(quarters[0]);
  const __m512 b = _mm512_castsi512_ps(quarters[1]);
  const __m512i pairs = _mm512_max_epu16(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                                         _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xDD)));
  // Lane 4i of 32 bits is of block i, 4i + 1 of 4 + i, 4i + 2 of 8 + i, 4i + 3 of 12 + i.
  const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i largest = _mm512_max_epu16(pairs, _mm512_srli_epi32(pairs, 16));
  return _mm512_cvtepi32_epi16(_mm512_permutexvar_epi32(places, largest));
}

DISTMOE_AVX512 void find_amax16(const BF16* values, std::int64_t num_blocks, BF16* amax) {
  const __m256i mask = _mm256_set1_epi16(0x7FFF);
  std::int64_t block = 0;
  for (; block + 16 <= num_blocks; block += 16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(amax + block),
                        find_16_amax16(values + 16 * block));
  }
  for (; block < num_blocks; ++block) {
    const auto* place = reinterpret_cast<const __m256i*>(values + 16 * block);
    amax[block].bits = largest_of(fold(_mm256_and_si256(_mm256_loadu_si256(place), mask)));
  }
}

DISTMOE_AVX512 void find_amax32(const BF16* values, std::int64_t num_blocks, BF16* amax) {
  const __m256i mask = _mm256_set1_epi16(0x7FFF);
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    const auto* place = reinterpret_cast<const __m256i*>(values + 32 * block);
    const __m256i first = _mm256_and_si256(_mm256_loadu_si256(place), mask);
    const __m256i second = _mm256_and_si256(_mm256_loadu_si256(place + 1), mask);
    amax[block].bits = largest_of(fold(_mm256_max_epu16(first, second)));
  }
}

}  // namespace

const BlockEncoders* avx512_block_encoders() {
  static constexpr BlockEncoders kAvx512 = {
      encode_e4m3_blocks,   encode_e4m3_columns, encode_e4m3_rows, encode_e2m1_blocks16,
      encode_e2m1_blocks32, find_nvfp4_scales,   find_amax16,      find_amax32};
  return has_avx512() ? &kAvx512 : nullptr;
}

}  // namespace distmoe

#else

namespace distmoe {

const BlockEncoders* avx512_block_encoders() { return nullptr; }

}  // namespace distmoe
#endif
