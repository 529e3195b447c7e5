// SPDX-License-Identifier: Apache-2.0
//
// Codes are rounded in FP32, as block_encoders_avx512.cpp rounds E2M1: with B the power of two of
// the value's binade (of the first normal number's below it), B * 2^n is added, n so that the sum's
// last place is the spacing of codes in that binade. The sum's low half is then the value in that
// spacing and its high half says the binade, both of which count codes. What is added has an even
// number of last places besides, which makes the two start from a multiple of 256.
//
// 16 values lie in a register. Even and odd ones are widened apart, because a BF16 is the upper
// half of its FP32, and their codes are put side by side again.
#include "formats/block_encoders.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#include <algorithm>

#include "formats/avx2.hpp"

namespace distmoe {
namespace {

constexpr std::int64_t kLanes = 16;
constexpr int kExponentBits = 0x7F800000;

DISTMOE_AVX2 inline __m256i load(const void* place) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(place));
}
DISTMOE_AVX2 inline void store(void* place, __m256i value) {
  _mm256_storeu_si256(static_cast<__m256i*>(place), value);
}
/// Magnitudes of the even, or of the odd, of 16 values.
DISTMOE_AVX2 inline __m256 even_magnitudes(__m256i values) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(_mm256_slli_epi32(values, 16), _mm256_set1_epi32(0x7FFFFFFF)));
}
DISTMOE_AVX2 inline __m256 odd_magnitudes(__m256i values) {
  return _mm256_castsi256_ps(_mm256_and_si256(values, _mm256_set1_epi32(0x7FFF0000)));
}
DISTMOE_AVX2 inline __m256 binade_of(__m256 values) {
  return _mm256_and_ps(values, _mm256_castsi256_ps(_mm256_set1_epi32(kExponentBits)));
}

// ---- E4M3

/// B * 2^20, whose last place is B / 8, eight codes a binade. Exponent field 127 + 20 counts 8 of
/// them, less those of the exponents that E4M3 lacks.
constexpr float kE4M3Shift = 0x1p20f + (5 * 256 - 8 * (127 + 20 - 6)) / 8.0f;

/// Codes of finite values, at least 0, in the low byte of each lane of 32 bits.
DISTMOE_AVX2 inline __m256i encode_e4m3(__m256 values) {
  const __m256 legal = _mm256_min_ps(values, _mm256_set1_ps(kE4M3Max));
  const __m256 binade = binade_of(_mm256_max_ps(legal, _mm256_set1_ps(0x1p-6f)));
  const __m256i sum =
      _mm256_castps_si256(_mm256_fmadd_ps(binade, _mm256_set1_ps(kE4M3Shift), legal));
  return _mm256_add_epi32(sum, _mm256_srli_epi32(sum, 20));
}

/// What even and odd values are multiplied by.
struct Multipliers {
  __m256 even, odd;
};

/// Codes of 16 values without their signs, two in the low half of each lane of 32 bits.
DISTMOE_AVX2 inline __m256i encode_16(__m256i values, const Multipliers& multipliers) {
  const __m256i even = encode_e4m3(_mm256_mul_ps(even_magnitudes(values), multipliers.even));
  const __m256i odd = encode_e4m3(_mm256_mul_ps(odd_magnitudes(values), multipliers.odd));
  return _mm256_or_si256(_mm256_and_si256(even, _mm256_set1_epi32(0xFF)),
                         _mm256_and_si256(_mm256_slli_epi32(odd, 8), _mm256_set1_epi32(0xFF00)));
}

/// Codes of 32 values.
DISTMOE_AVX2 inline __m256i encode_32(const BF16* values, const Multipliers& first,
                                      const Multipliers& second) {
  const __m256i a = load(values);
  const __m256i b = load(values + kLanes);
  const __m256i codes = _mm256_packus_epi32(encode_16(a, first), encode_16(b, second));
  // Saturated to a byte, a number keeps its sign.
  const __m256i signs =
      _mm256_and_si256(_mm256_packs_epi16(a, b), _mm256_set1_epi8(static_cast<char>(0x80)));
  return _mm256_permute4x64_epi64(_mm256_or_si256(codes, signs), 0xD8);
}

DISTMOE_AVX2 void encode_e4m3_blocks(const BF16* values, std::int64_t num_blocks,
                                     const E8M0* scales, E4M3* codes) {
  static_assert(kMxfp8BlockSize == 2 * kLanes);
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    const E8M0 scale = scales[block];
    const __m256 reciprocals = _mm256_set1_ps(reciprocal(scale));
    const Multipliers multipliers{reciprocals, reciprocals};
    const __m256i nan = _mm256_set1_epi8(static_cast<char>(kE4M3NaN.bits));
    store(codes, scale.bits == kE8M0NaN.bits ? nan : encode_32(values, multipliers, multipliers));
    values += kMxfp8BlockSize;
    codes += kMxfp8BlockSize;
  }
}

/// Scale bytes up to this have a reciprocal that is normal: 2^(127 - byte).
constexpr std::uint8_t kMaxScaleByte = 253;

/// Those of 16 scale bytes.
DISTMOE_AVX2 inline Multipliers reciprocals(__m128i bytes) {
  const __m256i exponents = _mm256_sub_epi16(_mm256_set1_epi16(254), _mm256_cvtepu8_epi16(bytes));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(exponents, 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(exponents, 16), 23))};
}

DISTMOE_AVX2 void encode_e4m3_columns(const BF16* values, std::int64_t count, const E8M0* scales,
                                      E4M3* codes) {
  const __m256i most = _mm256_set1_epi8(static_cast<char>(kMaxScaleByte));
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const __m256i bytes = load(scales + i);
    const __m256i is_legal = _mm256_cmpeq_epi8(_mm256_max_epu8(bytes, most), most);
    if (_mm256_movemask_epi8(is_legal) != -1) {
      plain_block_encoders().e4m3_columns(values + i, 2 * kLanes, scales + i, codes + i);
      continue;
    }
    store(codes + i, encode_32(values + i, reciprocals(_mm256_castsi256_si128(bytes)),
                               reciprocals(_mm256_extracti128_si256(bytes, 1))));
  }
  plain_block_encoders().e4m3_columns(values + i, count - i, scales + i, codes + i);
}

/// Whether all scales but those behind the last 32 have reciprocals().
DISTMOE_AVX2 bool are_all_ordinary(const E8M0* scales, std::int64_t count) {
  __m256i largest = _mm256_setzero_si256();
  for (std::int64_t i = 0; i + 2 * kLanes <= count; i += 2 * kLanes) {
    largest = _mm256_max_epu8(largest, load(scales + i));
  }
  const __m256i most = _mm256_set1_epi8(static_cast<char>(kMaxScaleByte));
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(largest, most), most)) == -1;
}

/// Rows that share what their columns are multiplied by.
constexpr std::int64_t kRowsAtATime = 4;

/// Rows from `first` on, all columns but those behind the last 32.
DISTMOE_AVX2 void encode_e4m3_band(const RowsToEncode& rows, std::int64_t first,
                                   std::int64_t num_cols, const E8M0* scales) {
  const BF16* values = rows.values + first * rows.row_stride;
  E4M3* codes = rows.codes + first * rows.code_stride;
  const std::int64_t num_ahead = std::min(kRowsAtATime, rows.ahead.num_rows - first);
  for (std::int64_t col = 0; col + 2 * kLanes <= num_cols; col += 2 * kLanes) {
    const __m256i bytes = load(scales + col);
    const Multipliers left = reciprocals(_mm256_castsi256_si128(bytes));
    const Multipliers right = reciprocals(_mm256_extracti128_si256(bytes, 1));
    for (std::int64_t i = 0; i < kRowsAtATime; ++i) {
      store(codes + i * rows.code_stride + col,
            encode_32(values + i * rows.row_stride + col, left, right));
      if (i < num_ahead && col < rows.ahead.num_cols) {
        __builtin_prefetch(rows.ahead.data + (first + i) * rows.ahead.row_stride + col);
      }
    }
  }
}

DISTMOE_AVX2 void encode_e4m3_rows(const RowsToEncode& rows, std::int64_t num_cols,
                                   const E8M0* scales) {
  const bool is_ordinary = are_all_ordinary(scales, num_cols);
  const std::int64_t whole = is_ordinary ? num_cols / (2 * kLanes) * (2 * kLanes) : 0;
  std::int64_t row = 0;
  for (; is_ordinary && row + kRowsAtATime <= rows.num_rows; row += kRowsAtATime) {
    encode_e4m3_band(rows, row, num_cols, scales);
    for (std::int64_t i = row; i < row + kRowsAtATime; ++i) {
      encode_e4m3_columns(rows.values + i * rows.row_stride + whole, num_cols - whole,
                          scales + whole, rows.codes + i * rows.code_stride + whole);
    }
  }
  for (; row < rows.num_rows; ++row) {
    encode_e4m3_columns(rows.values + row * rows.row_stride, num_cols, scales,
                        rows.codes + row * rows.code_stride);
  }
}

// ---- E2M1

/// Counts of codes start from this.
constexpr int kFirstCode = 512;

/// B * 2^22, whose last place is B / 2, two codes a binade. Exponent field 127 + 22 counts 298.
constexpr float kE2M1Shift = 0x1p22f + (kFirstCode - 2 * (127 + 22)) / 2.0f;

/// The values, at least 0 and below 2^100, rounded. In the low half codes that exceed those in the
/// exponent, in the high half 64 times those.
DISTMOE_AVX2 inline __m256i round_to_e2m1(__m256 values) {
  const __m256 binade = binade_of(_mm256_max_ps(values, _mm256_set1_ps(1.0f)));
  return _mm256_castps_si256(_mm256_fmadd_ps(binade, _mm256_set1_ps(kE2M1Shift), values));
}

/// A byte of two codes in the second byte of each lane of 32 bits.
DISTMOE_AVX2 inline __m256i encode_e2m1(const BF16* values, float multiplier) {
  const __m256i narrow = load(values);
  const __m256 multipliers = _mm256_set1_ps(multiplier);
  const __m256i even = round_to_e2m1(_mm256_mul_ps(even_magnitudes(narrow), multipliers));
  const __m256i odd = round_to_e2m1(_mm256_mul_ps(odd_magnitudes(narrow), multipliers));
  // 64 * (kFirstCode + code) in 16-bit lanes: 64 times a sum's low half plus its high half.
  const __m256i of_even = _mm256_madd_epi16(even, _mm256_set1_epi32(1 << 16 | 64));
  const __m256i of_odd = _mm256_add_epi16(odd, _mm256_slli_epi32(odd, 22));
  const __m256i code =
      _mm256_min_epu16(_mm256_blend_epi16(of_even, of_odd, 0xAA),
                       _mm256_set1_epi16(static_cast<short>(64 * (kFirstCode + 7))));
  const __m256i signs = _mm256_and_si256(_mm256_srli_epi16(narrow, 6), _mm256_set1_epi16(8 * 64));
  // The even code times 256 plus the odd one times 16 * 256; of both 64 is there already.
  return _mm256_madd_epi16(_mm256_or_si256(code, signs), _mm256_set1_epi32(64 << 16 | 4));
}

/// 16 bytes of the codes of 32 values.
DISTMOE_AVX2 inline __m128i pack_e2m1_bytes(__m256i first, __m256i second) {
  constexpr char kNone = -1;
  const __m128i of_first = _mm_setr_epi8(1, 5, 9, 13, kNone, kNone, kNone, kNone, kNone, kNone,
                                         kNone, kNone, kNone, kNone, kNone, kNone);
  const __m128i of_second = _mm_setr_epi8(kNone, kNone, kNone, kNone, 1, 5, 9, 13, kNone, kNone,
                                          kNone, kNone, kNone, kNone, kNone, kNone);
  const __m256i both =
      _mm256_or_si256(_mm256_shuffle_epi8(first, _mm256_broadcastsi128_si256(of_first)),
                      _mm256_shuffle_epi8(second, _mm256_broadcastsi128_si256(of_second)));
  const __m256i places = _mm256_setr_epi32(0, 4, 1, 5, 2, 2, 2, 2);
  return _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(both, places));
}

DISTMOE_AVX2 void encode_e2m1_blocks16(const BF16* values, std::int64_t num_blocks,
                                       const float* multipliers, std::uint8_t* codes) {
  std::int64_t block = 0;
  for (; block + 2 <= num_blocks; block += 2) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes),
                     pack_e2m1_bytes(encode_e2m1(values, multipliers[block]),
                                     encode_e2m1(values + kLanes, multipliers[block + 1])));
    values += 2 * kLanes;
    codes += kLanes;
  }
  if (block < num_blocks) {
    plain_block_encoders().e2m1_blocks16(values, 1, multipliers + block, codes);
  }
}

DISTMOE_AVX2 void encode_e2m1_blocks32(const BF16* values, std::int64_t num_blocks,
                                       const float* multipliers, std::uint8_t* codes) {
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes),
                     pack_e2m1_bytes(encode_e2m1(values, multipliers[block]),
                                     encode_e2m1(values + kLanes, multipliers[block])));
    values += 2 * kLanes;
    codes += kLanes;
  }
}

// ---- Scales

DISTMOE_AVX2 void find_nvfp4_scales(const BF16* amax, std::int64_t count, float factor,
                                    E4M3* scales, float* multipliers) {
  const __m256 factors = _mm256_set1_ps(factor);
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i wide =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(amax + i)));
    const __m256 largest = _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    const __m256 exact = _mm256_mul_ps(_mm256_mul_ps(largest, factors), _mm256_set1_ps(1.0f / 6));
    const __m256 scale = _mm256_min_ps(_mm256_max_ps(exact, _mm256_set1_ps(kNvfp4MinScale)),
                                       _mm256_set1_ps(kE4M3Max));
    const __m256 binade = binade_of(_mm256_max_ps(scale, _mm256_set1_ps(0x1p-6f)));
    const __m256 sum = _mm256_fmadd_ps(binade, _mm256_set1_ps(kE4M3Shift), scale);
    const __m256 rounded = _mm256_fnmadd_ps(binade, _mm256_set1_ps(kE4M3Shift), sum);
    const __m256i bits = _mm256_castps_si256(sum);
    const __m256i codes = _mm256_and_si256(_mm256_add_epi32(bits, _mm256_srli_epi32(bits, 20)),
                                           _mm256_set1_epi32(0xFF));
    const __m128i words =
        _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(scales + i), _mm_packus_epi16(words, words));
    _mm256_storeu_ps(multipliers + i, _mm256_div_ps(factors, rounded));
  }
  plain_block_encoders().nvfp4_scales(amax + i, count - i, factor, scales + i, multipliers + i);
}

DISTMOE_AVX2 inline __m256i load_magnitudes(const BF16* values) {
  return _mm256_and_si256(load(values), _mm256_set1_epi16(0x7FFF));
}

/// The larger of the halves of both: a's in the first half, b's in the second.
DISTMOE_AVX2 inline __m256i fold(__m256i a, __m256i b) {
  return _mm256_max_epu16(_mm256_permute2x128_si256(a, b, 0x20),
                          _mm256_permute2x128_si256(a, b, 0x31));
}

/// The largest of each of 8 blocks, of 16 lanes of 16 bits, in the order of `blocks`.
template <typename LoadBlock>
DISTMOE_AVX2 inline __m128i find_8_amax(const LoadBlock& load_block) {
  __m256i quarters[2];
  for (int i = 0; i < 2; ++i) {
    const __m256i a = fold(load_block(4 * i), load_block(4 * i + 1));
    const __m256i b = fold(load_block(4 * i + 2), load_block(4 * i + 3));
    quarters[i] = _mm256_max_epu16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  }
  // 64 bits a block: 0, 2, 1, 3 and 4, 6, 5, 7.
  const __m256 a = _mm256_castsi256_ps(quarters[0]);
  const __m256 b = _mm256_castsi256_ps(quarters[1]);
  const __m256i pairs = _mm256_max_epu16(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)),
                                         _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xDD)));
  // 32 bits a block: 0, 2, 4, 6, 1, 3, 5, 7.
  const __m256i largest = _mm256_and_si256(_mm256_max_epu16(pairs, _mm256_srli_epi32(pairs, 16)),
                                           _mm256_set1_epi32(0xFFFF));
  const __m256i ordered =
      _mm256_permutevar8x32_epi32(largest, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  return _mm_packus_epi32(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
}

struct LoadBlock16 {
  const BF16* values;
  DISTMOE_AVX2 __m256i operator()(int block) const { return load_magnitudes(values + 16 * block); }
};
struct LoadBlock32 {
  const BF16* values;
  DISTMOE_AVX2 __m256i operator()(int block) const {
    return _mm256_max_epu16(load_magnitudes(values + 32 * block),
                            load_magnitudes(values + 32 * block + kLanes));
  }
};

DISTMOE_AVX2 void find_amax16(const BF16* values, std::int64_t num_blocks, BF16* amax) {
  std::int64_t block = 0;
  for (; block + 8 <= num_blocks; block += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(amax + block),
                     find_8_amax(LoadBlock16{values + 16 * block}));
  }
  plain_block_encoders().amax_blocks16(values + 16 * block, num_blocks - block, amax + block);
}

DISTMOE_AVX2 void find_amax32(const BF16* values, std::int64_t num_blocks, BF16* amax) {
  std::int64_t block = 0;
  for (; block + 8 <= num_blocks; block += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(amax + block),
                     find_8_amax(LoadBlock32{values + 32 * block}));
  }
  plain_block_encoders().amax_blocks32(values + 32 * block, num_blocks - block, amax + block);
}

}  // namespace

const BlockEncoders* avx2_block_encoders() {
  static constexpr BlockEncoders kAvx2 = {
      encode_e4m3_blocks,   encode_e4m3_columns, encode_e4m3_rows, encode_e2m1_blocks16,
      encode_e2m1_blocks32, find_nvfp4_scales,   find_amax16,      find_amax32};
  return has_avx2() ? &kAvx2 : nullptr;
}

}  // namespace distmoe

#else

namespace distmoe {

const BlockEncoders* avx2_block_encoders() { return nullptr; }

}  // namespace distmoe
#endif
