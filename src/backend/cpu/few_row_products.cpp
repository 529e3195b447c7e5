// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/few_row_products.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/check.hpp"
#include "core/checked_math.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#define DISTMOE_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
// NOTE: sums in an array stay in registers only where their loops are gone early: g++ 12 else
// stores all of them to the stack in every step.
#define DISTMOE_UNROLL _Pragma("GCC unroll 8")
#define DISTMOE_AVX512_BF16_INLINE inline __attribute__((always_inline)) DISTMOE_AVX512_BF16
#endif

namespace distmoe::cpu {

#if defined(__x86_64__)

namespace {

/// FP32 in a vector, and pairs of BF16.
constexpr std::int64_t kLanes = 16;
/// Columns whose sums are in registers at a time: one vector of BF16.
constexpr std::int64_t kPanelColumns = 2 * kLanes;

DISTMOE_AVX512_BF16_INLINE __m512bh load_pairs(const std::uint32_t* from) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from));
}

DISTMOE_AVX512_BF16_INLINE __m512bh broadcast_pair(std::uint32_t pair) {
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(pair)));
}

bool supports_avx512_bf16() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512bf16") != 0;
}

// ---- DGRAD

/// Depth between two visits of a panel; meanwhile its sums are in memory.
constexpr std::int64_t kDepthBlock = 32;
/// Rows whose sums are in registers at a time.
constexpr std::int64_t kGroupRows = 8;

/// Of what is not there.
alignas(64) constexpr std::array<BF16, kCpuPackedColumns> kZeros{};

/// Some depth of the weights, as rows that are made up to a whole block by zeros.
struct DepthBlock {
  DepthBlock(const DepthRows& weights, std::int64_t first)
      : num_rows(std::clamp<std::int64_t>(weights.depth() - first, 0, kDepthBlock)) {
    for (std::int64_t k = 0; k < num_rows; ++k) {
      rows[static_cast<std::size_t>(k)] = weights.row(first + k);
    }
    for (std::int64_t k = num_rows; k < kDepthBlock; ++k) {
      rows[static_cast<std::size_t>(k)] = kZeros.data();
    }
  }
  std::int64_t num_pairs() const { return ceil_div(num_rows, 2); }

  std::int64_t num_rows;
  std::array<const BF16*, kDepthBlock> rows{};
};

/// The same depth of the other operand: [pair of depth][row].
struct PairBlock {
  PairBlock(const MatrixView& a, std::int64_t first, std::int64_t depth) {
    for (std::int64_t i = 0; i < a.num_rows; ++i) {
      const BF16* row = a.data + i * a.row_stride + first;
      for (std::int64_t k = 0; k < depth; k += 2) {
        const std::uint32_t high = k + 1 < depth ? row[k + 1].bits : 0;
        pairs[static_cast<std::size_t>(k / 2 * kFewRows + i)] = high << 16 | row[k].bits;
      }
    }
  }
  std::array<std::uint32_t, kDepthBlock / 2 * kFewRows> pairs{};
};

/// What is read ahead while a panel of a block is multiplied: its share of the next block.
struct LinesAhead {
  LinesAhead(const DepthBlock& next, std::int64_t panel, std::int64_t num_panels) {
    for (std::int64_t i = 0; i < kDepthBlock; ++i) {
      const std::int64_t line = panel * kDepthBlock + i;
      lines[static_cast<std::size_t>(i)] = next.rows[static_cast<std::size_t>(line / num_panels)] +
                                           line % num_panels * kPanelColumns;
    }
  }
  void prefetch(std::size_t i) const { __builtin_prefetch(lines[i], 0, 2); }

  std::array<const BF16*, kDepthBlock> lines{};
};

/// Adds a block of depth to the sums of NumRows rows in a panel. In each of four parts a vector of
/// sums has four columns of the panel, then the other vector the next four.
template <int NumRows>
DISTMOE_AVX512_BF16 void add_panel(const DepthBlock& block, const std::uint32_t* pairs,
                                   std::int64_t column, __mmask32 mask, const LinesAhead& ahead,
                                   float* sums_of_rows) {
  __m512 sums[NumRows][2];
  DISTMOE_UNROLL
  for (int i = 0; i < NumRows; ++i) {
    float* row = sums_of_rows + i * kCpuPackedColumns + column;
    sums[i][0] = _mm512_loadu_ps(row);
    sums[i][1] = _mm512_loadu_ps(row + kLanes);
  }
  for (std::int64_t p = 0; p < block.num_pairs(); ++p) {
    const auto k = static_cast<std::size_t>(2 * p);
    ahead.prefetch(k);
    ahead.prefetch(k + 1);
    const __m512i row0 = _mm512_maskz_loadu_epi16(mask, block.rows[k] + column);
    const __m512i row1 = _mm512_maskz_loadu_epi16(mask, block.rows[k + 1] + column);
    const auto low = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(row0, row1));
    const auto high = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(row0, row1));
    DISTMOE_UNROLL
    for (int i = 0; i < NumRows; ++i) {
      const __m512bh a = broadcast_pair(pairs[p * kFewRows + i]);
      sums[i][0] = _mm512_dpbf16_ps(sums[i][0], a, low);
      sums[i][1] = _mm512_dpbf16_ps(sums[i][1], a, high);
    }
  }
  DISTMOE_UNROLL
  for (int i = 0; i < NumRows; ++i) {
    float* row = sums_of_rows + i * kCpuPackedColumns + column;
    _mm512_storeu_ps(row, sums[i][0]);
    _mm512_storeu_ps(row + kLanes, sums[i][1]);
  }
}

using AddPanel = void (*)(const DepthBlock&, const std::uint32_t*, std::int64_t, __mmask32,
                          const LinesAhead&, float*);
constexpr std::array<AddPanel, kGroupRows> kAddPanel{add_panel<1>, add_panel<2>, add_panel<3>,
                                                     add_panel<4>, add_panel<5>, add_panel<6>,
                                                     add_panel<7>, add_panel<8>};

/// The sums of one row in the order of columns.
DISTMOE_AVX512_BF16 void put_in_order(const float* sums, std::int64_t num_columns, float* out) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (std::int64_t column = 0; column < num_columns; column += kPanelColumns) {
    const __m512 low = _mm512_loadu_ps(sums + column);
    const __m512 high = _mm512_loadu_ps(sums + column + kLanes);
    const std::int64_t rest = std::min(num_columns - column, kPanelColumns);
    const auto mask = static_cast<std::uint32_t>((std::uint64_t{1} << rest) - 1);
    _mm512_mask_storeu_ps(out + column, static_cast<__mmask16>(mask),
                          _mm512_permutex2var_ps(low, first, high));
    if (rest <= kLanes) continue;
    _mm512_mask_storeu_ps(out + column + kLanes, static_cast<__mmask16>(mask >> kLanes),
                          _mm512_permutex2var_ps(low, second, high));
  }
}

// ---- WGRAD

using StripSums = __m512[FewRowsWgrad::kStripRows][2];

/// The sums of a strip in a panel.
DISTMOE_AVX512_BF16_INLINE void sum_strip(const std::uint32_t* a, std::int64_t a_width,
                                          const std::uint32_t* b, std::int64_t b_width,
                                          std::int64_t num_pairs, StripSums& sums) {
  DISTMOE_UNROLL
  for (auto& row : sums) row[0] = row[1] = _mm512_setzero_ps();
  for (std::int64_t p = 0; p < num_pairs; ++p) {
    const __m512bh b0 = load_pairs(b + p * b_width);
    const __m512bh b1 = load_pairs(b + p * b_width + kLanes);
    DISTMOE_UNROLL
    for (int i = 0; i < FewRowsWgrad::kStripRows; ++i) {
      const __m512bh pair = broadcast_pair(a[p * a_width + i]);
      sums[i][0] = _mm512_dpbf16_ps(sums[i][0], pair, b0);
      sums[i][1] = _mm512_dpbf16_ps(sums[i][1], pair, b1);
    }
  }
}

}  // namespace

bool has_few_row_products() {
  static const bool has = matmul_kind() == MatmulKind::kBF16 && supports_avx512_bf16();
  return has;
}

// NOTE: the lines of a slab are short pieces of long rows, which the processor does not see coming:
// while a block is multiplied, the next one is read row by row.
void multiply_few_rows_dgrad(const MatrixView& rows, const DepthRows& weights, float* tile) {
  alignas(64) std::array<float, kFewRows * kCpuPackedColumns> sums{};
  const std::int64_t num_panels = ceil_div(weights.num_columns, kPanelColumns);
  const std::int64_t num_groups = ceil_div(rows.num_rows, kGroupRows);
  DepthBlock block(weights, 0);
  for (std::int64_t first = 0; block.num_rows > 0; first += kDepthBlock) {
    const DepthBlock next(weights, first + kDepthBlock);
    const PairBlock a(rows, first, block.num_rows);
    for (std::int64_t panel = 0; panel < num_panels; ++panel) {
      const LinesAhead ahead(next, panel, num_panels);
      const std::int64_t column = panel * kPanelColumns;
      const std::int64_t rest = std::min(weights.num_columns - column, kPanelColumns);
      const auto mask = static_cast<__mmask32>((std::uint64_t{1} << rest) - 1);
      for (std::int64_t group = 0; group < num_groups; ++group) {
        const std::int64_t begin = group * rows.num_rows / num_groups;
        const std::int64_t end = (group + 1) * rows.num_rows / num_groups;
        kAddPanel[static_cast<std::size_t>(end - begin - 1)](
            block, a.pairs.data() + begin, column, mask, ahead,
            sums.data() + begin * kCpuPackedColumns);
      }
    }
    block = next;
  }
  for (std::int64_t i = 0; i < rows.num_rows; ++i) {
    put_in_order(sums.data() + i * kCpuPackedColumns, weights.num_columns,
                 tile + i * weights.num_columns);
  }
}

FewRowsWgrad::FewRowsWgrad(const RowSlab& a, const RowSlab& b, std::int64_t num_rows,
                           const Workspace& workspace)
    : a_width_(ceil_div(a.num_columns, kStripRows) * kStripRows),
      b_width_(ceil_div(b.num_columns, kPanelColumns) * kPanelColumns),
      num_pairs_(ceil_div(num_rows, 2)) {
  static_assert(kFewRows * (kCpuTileColumns + kCpuRowBlock) * sizeof(BF16) <=
                kCpuLibraryScratchBytes);
  auto* packed_b = reinterpret_cast<BF16*>(workspace.library_scratch);
  BF16* packed_a = packed_b + num_pairs_ * 2 * b_width_;
  pack_row_pairs({.first = b.data,
                  .num_rows = num_rows,
                  .num_columns = b.num_columns,
                  .row_stride = b.row_stride},
                 b_width_, packed_b);
  pack_row_pairs({.first = a.data,
                  .num_rows = num_rows,
                  .num_columns = a.num_columns,
                  .row_stride = a.row_stride},
                 a_width_, packed_a);
  a_ = reinterpret_cast<const std::uint32_t*>(packed_a);
  b_ = reinterpret_cast<const std::uint32_t*>(packed_b);
}

DISTMOE_AVX512_BF16 void FewRowsWgrad::multiply(std::int64_t first, float* sums) const {
  for (std::int64_t column = 0; column < b_width_; column += kPanelColumns) {
    StripSums strip{};
    sum_strip(a_ + first, a_width_, b_ + column, b_width_, num_pairs_, strip);
    DISTMOE_UNROLL
    for (int i = 0; i < kStripRows; ++i) {
      _mm512_storeu_ps(sums + i * b_width_ + column, strip[i][0]);
      _mm512_storeu_ps(sums + i * b_width_ + column + kLanes, strip[i][1]);
    }
  }
}

// NOTE: the processor's rounding takes subnormals for zero, but a sum of its products is never one:
// these flush them too. So the bits are those of to_bf16().
DISTMOE_AVX512_BF16 void FewRowsWgrad::multiply(std::int64_t first, BF16* rounded) const {
  for (std::int64_t column = 0; column < b_width_; column += kPanelColumns) {
    StripSums strip{};
    sum_strip(a_ + first, a_width_, b_ + column, b_width_, num_pairs_, strip);
    DISTMOE_UNROLL
    for (int i = 0; i < kStripRows; ++i) {
      const __m512bh line = _mm512_cvtne2ps_pbh(strip[i][1], strip[i][0]);
      _mm512_storeu_si512(rounded + i * b_width_ + column, reinterpret_cast<__m512i>(line));
    }
  }
}

#else

bool has_few_row_products() { return false; }

void multiply_few_rows_dgrad(const MatrixView&, const DepthRows&, float*) {
  throw_error(ErrorCode::kInternal, "products of few rows need AVX512-BF16");
}

FewRowsWgrad::FewRowsWgrad(const RowSlab&, const RowSlab&, std::int64_t, const Workspace&)
    : a_(nullptr), b_(nullptr), a_width_(0), b_width_(0), num_pairs_(0) {
  throw_error(ErrorCode::kInternal, "products of few rows need AVX512-BF16");
}

void FewRowsWgrad::multiply(std::int64_t, float*) const {}
void FewRowsWgrad::multiply(std::int64_t, BF16*) const {}

#endif

}  // namespace distmoe::cpu
