// SPDX-License-Identifier: Apache-2.0
//
// How a row is walked by the quantisers that work along it: the amax of many blocks first, so that
// their scales are computed side by side, then the codes, while the values are still in the first
// cache.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/simd.hpp"
#include "formats/bf16.hpp"
#include "formats/block_encoders.hpp"
#include "formats/block_scaled.hpp"

namespace distmoe {

inline constexpr std::int64_t kBlocksPerRun = 64;

/// Consecutive blocks of a row from column `begin` on, the last of which may be partial.
struct BlockRun {
  std::int64_t begin = 0;
  std::int64_t num_blocks = 0;  ///< the partial one included
  std::int64_t num_whole_blocks = 0;
  std::int64_t num_rest = 0;   ///< elements of the partial one; 0 where there is none
  const BF16* amax = nullptr;  ///< [num_blocks], without a sign
};

/// Asks for the memory of the same columns of the row that is quantised afterwards, null where
/// there is none: the processor's own prefetcher stops at the end of a row.
template <std::int64_t Block>
void prefetch_run(const BF16* next_row, const BlockRun& run) {
  if (next_row == nullptr) return;
  const std::int64_t num_cols = run.num_whole_blocks * Block + run.num_rest;
  prefetch(next_row + run.begin, num_cols * static_cast<std::int64_t>(sizeof(BF16)));
}

/// Magnitude bits of the largest of `count` values.
std::uint16_t amax_bits(const BF16* values, std::int64_t count);

/// The amax of every block of a row, without a sign; the last may be partial.
template <std::int64_t Block>
void find_block_amax(const BlockEncoders& encoders, const BF16* values, std::int64_t num_cols,
                     BF16* amax) {
  const std::int64_t num_whole = num_cols / Block;
  const auto find = Block == 16 ? encoders.amax_blocks16 : encoders.amax_blocks32;
  find(values, num_whole, amax);
  const std::int64_t num_rest = num_cols % Block;
  if (num_rest > 0) amax[num_whole] = BF16{amax_bits(values + num_whole * Block, num_rest)};
}

/// `known_amax` is null or that of all blocks.
template <std::int64_t Block, typename Visit>
void for_each_run(const BlockEncoders& encoders, const BF16* values, std::int64_t num_cols,
                  const Visit& visit, const BF16* known_amax = nullptr) {
  std::array<BF16, kBlocksPerRun> amax{};
  for (std::int64_t begin = 0; begin < num_cols; begin += kBlocksPerRun * Block) {
    const std::int64_t count = std::min(kBlocksPerRun * Block, num_cols - begin);
    BlockRun run{begin, 0, count / Block, count % Block, amax.data()};
    run.num_blocks = run.num_whole_blocks + (run.num_rest > 0 ? 1 : 0);
    if (known_amax != nullptr) {
      run.amax = known_amax + begin / Block;
    } else {
      find_block_amax<Block>(encoders, values + begin, count, amax.data());
    }
    visit(run);
  }
}

/// Codes and scales 0 for the rows of padding behind those in memory.
template <typename Code, typename Scale>
void zero_padding_rows(const BF16Rows& values, const BlockScaledView<Code, Scale>& out,
                       std::int64_t codes_per_row, std::int64_t scales_per_row) {
  for (std::int64_t i = 0; i < values.num_padding_rows; ++i) {
    const std::int64_t row = values.num_rows + i;
    std::fill_n(out.codes + row * out.code_stride, codes_per_row, Code{0});
    std::fill_n(out.scales + row * out.scale_stride, scales_per_row, Scale{0});
  }
}

}  // namespace distmoe
