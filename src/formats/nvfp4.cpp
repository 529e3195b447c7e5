// SPDX-License-Identifier: Apache-2.0
#include "formats/nvfp4.hpp"

#include <algorithm>
#include <array>

#include "core/checked_math.hpp"
#include "core/simd.hpp"
#include "formats/block_decoders.hpp"
#include "formats/block_encoders.hpp"
#include "formats/block_runs.hpp"
#include "formats/fp4_rows.hpp"

namespace distmoe {
namespace {

constexpr std::int64_t kBlock = kNvfp4BlockSize;
/// Blocks of a row whose amax are kept while its factor is found: 16384 columns.
constexpr std::int64_t kMaxKeptBlocks = 1024;

/// What is known of a row before it is quantised.
struct RowFacts {
  float amax = 0.0f;  ///< of all that share the factor
  float factor = 1.0f;
  const BF16* block_amax = nullptr;  ///< of each block, or null
};

/// `next_row` is null or what is quantised afterwards.
void quantise_row(const BF16* values, const BF16* next_row, std::int64_t num_cols,
                  const RowFacts& facts, std::uint8_t* codes, E4M3* scales) {
  const BlockEncoders& encoders = block_encoders();
  const auto visit = [&](const BlockRun& run) {
    std::uint8_t* run_codes = codes + run.begin / 2;
    std::array<float, kBlocksPerRun> multipliers{};
    prefetch_run<kBlock>(next_row, run);
    encoders.nvfp4_scales(run.amax, run.num_blocks, facts.factor, scales + run.begin / kBlock,
                          multipliers.data());
    encoders.e2m1_blocks16(values + run.begin, run.num_whole_blocks, multipliers.data(), run_codes);
    const std::int64_t rest = run.num_whole_blocks * kBlock;
    encode_e2m1_rest(values + run.begin + rest, run.num_rest,
                     multipliers[static_cast<std::size_t>(run.num_blocks - 1)],
                     run_codes + rest / 2);
  };
  for_each_run<kBlock>(encoders, values, num_cols, visit, facts.block_amax);
}

void poison_row(std::int64_t num_cols, std::uint8_t* codes, E4M3* scales) {
  poison_e2m1(codes, num_cols);
  std::fill_n(scales, ceil_div(num_cols, kBlock), kE4M3NaN);
}

void fill_zero_row(std::int64_t num_cols, float factor, std::uint8_t* codes, E4M3* scales) {
  std::fill_n(codes, ceil_div(num_cols, 2), std::uint8_t{0});
  std::fill_n(scales, ceil_div(num_cols, kBlock), nvfp4_scale(0.0f, factor));
}

/// Row `row`; one of padding where it lies behind those in memory.
void quantise_or_poison(const BF16Rows& values, std::int64_t row, const RowFacts& facts,
                        const Nvfp4View& out) {
  std::uint8_t* codes = out.codes + row * out.code_stride;
  E4M3* scales = out.scales + row * out.scale_stride;
  if (!is_finite_amax(facts.amax)) {
    poison_row(values.num_cols, codes, scales);
  } else if (row < values.num_rows) {
    const BF16* own = values.data + row * values.row_stride;
    const BF16* next = row + 1 < values.num_rows ? own + values.row_stride : nullptr;
    quantise_row(own, next, values.num_cols, facts, codes, scales);
  } else {
    fill_zero_row(values.num_cols, facts.factor, codes, scales);
  }
}

std::int64_t code_bytes(std::int64_t num_rows, std::int64_t num_cols) {
  return align_up(checked_mul(num_rows, ceil_div(num_cols, 2)));
}
std::int64_t factor_bytes(std::int64_t num_rows) {
  return checked_mul(num_rows, std::int64_t{sizeof(float)});
}

}  // namespace

void quantise_nvfp4_rows(const BF16Rows& values, const Nvfp4View& out, float* factors) {
  // NOTE: the row's amax is that of its blocks', which are found once: at 4096 columns in the
  // second cache a pass of its own took 8 percent more time.
  std::array<BF16, kMaxKeptBlocks> block_amax{};
  const std::int64_t num_blocks = ceil_div(values.num_cols, kBlock);
  const bool is_kept = num_blocks <= kMaxKeptBlocks;
  for (std::int64_t row = 0; row < values.num_rows + values.num_padding_rows; ++row) {
    RowFacts facts;
    if (row < values.num_rows) {
      const BF16* own = values.data + row * values.row_stride;
      if (is_kept) {
        find_block_amax<kBlock>(block_encoders(), own, values.num_cols, block_amax.data());
        facts.block_amax = block_amax.data();
      }
      facts.amax = is_kept ? amax_of({block_amax.data(), 1, num_blocks, num_blocks})
                           : amax_of({own, 1, values.num_cols, values.num_cols});
    }
    factors[row] = facts.factor = nvfp4_factor(facts.amax, kNvfp4RowFloor);
    quantise_or_poison(values, row, facts, out);
  }
}

float quantise_nvfp4_expert(const BF16Rows& values, float expert_amax, const Nvfp4View& out) {
  const float factor = nvfp4_factor(expert_amax, kNvfp4ExpertFloor);
  for (std::int64_t row = 0; row < values.num_rows + values.num_padding_rows; ++row) {
    quantise_or_poison(values, row, {expert_amax, factor, nullptr}, out);
  }
  return factor;
}

void decode_nvfp4(const ConstNvfp4View& view, const DecodedRows<BF16>& out) {
  decode_fp4_rows<kBlock>(view, block_decoders().nvfp4_blocks, out);
}
void decode_nvfp4(const ConstNvfp4View& view, const DecodedRows<double>& out) {
  decode_fp4_rows<kBlock>(view, out);
}

Nvfp4Rows nvfp4_rows_region(std::byte* region, std::int64_t num_rows, std::int64_t num_cols) {
  std::byte* factors = region + code_bytes(num_rows, num_cols);
  std::byte* scales = factors + factor_bytes(num_rows);
  return {{reinterpret_cast<std::uint8_t*>(region), reinterpret_cast<E4M3*>(scales),
           ceil_div(num_cols, 2), ceil_div(num_cols, kBlock)},
          reinterpret_cast<float*>(factors)};
}

std::int64_t nvfp4_rows_region_bytes(std::int64_t num_rows, std::int64_t num_cols) {
  const std::int64_t scale_bytes = checked_mul(num_rows, ceil_div(num_cols, kBlock));
  return code_bytes(num_rows, num_cols) +
         align_up(checked_add(scale_bytes, factor_bytes(num_rows)));
}

}  // namespace distmoe
