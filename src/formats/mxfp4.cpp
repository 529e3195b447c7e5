// SPDX-License-Identifier: Apache-2.0
#include "formats/mxfp4.hpp"

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

constexpr std::int64_t kBlock = kMxfp4BlockSize;

DISTMOE_SIMD_CLONES void find_scales(const BF16* amax, std::int64_t count, E8M0* scales,
                                     float* multipliers) {
  // NOTE: two loops, which the compiler turns into vectors; as one it does not.
  for (std::int64_t i = 0; i < count; ++i) scales[i] = mxfp4_scale(to_float(amax[i]));
  for (std::int64_t i = 0; i < count; ++i) {
    multipliers[i] = scales[i].bits == kE8M0NaN.bits ? 0.0f : reciprocal(scales[i]);
  }
}

/// `next_row` is null or what is quantised afterwards.
void quantise_row(const BlockEncoders& encoders, const BF16* values, const BF16* next_row,
                  std::int64_t num_cols, const Mxfp4View& out) {
  for_each_run<kBlock>(encoders, values, num_cols, [&](const BlockRun& run) {
    prefetch_run<kBlock>(next_row, run);
    E8M0* run_scales = out.scales + run.begin / kBlock;
    std::uint8_t* run_codes = out.codes + run.begin / 2;
    std::array<float, kBlocksPerRun> multipliers{};
    find_scales(run.amax, run.num_blocks, run_scales, multipliers.data());
    encoders.e2m1_blocks32(values + run.begin, run.num_whole_blocks, multipliers.data(), run_codes);
    const std::int64_t rest = run.num_whole_blocks * kBlock;
    encode_e2m1_rest(values + run.begin + rest, run.num_rest,
                     multipliers[static_cast<std::size_t>(run.num_blocks - 1)],
                     run_codes + rest / 2);
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(run_scales);
    if (find_scale_above(bytes, run.num_blocks, kE8M0NaN.bits - 1) == run.num_blocks) return;
    for (std::int64_t block = 0; block < run.num_blocks; ++block) {
      if (run_scales[block].bits != kE8M0NaN.bits) continue;
      const bool is_whole = block < run.num_whole_blocks;
      poison_e2m1(run_codes + block * kMxfp4BlockBytes, is_whole ? kBlock : run.num_rest);
    }
  });
}

}  // namespace

void quantise_mxfp4(const BF16Rows& values, const Mxfp4View& out) {
  const BlockEncoders& encoders = block_encoders();
  for (std::int64_t row = 0; row < values.num_rows; ++row) {
    const BF16* own = values.data + row * values.row_stride;
    quantise_row(encoders, own, row + 1 < values.num_rows ? own + values.row_stride : nullptr,
                 values.num_cols,
                 {out.codes + row * out.code_stride, out.scales + row * out.scale_stride});
  }
  zero_padding_rows(values, out, ceil_div(values.num_cols, 2), ceil_div(values.num_cols, kBlock));
}

void decode_mxfp4(const ConstMxfp4View& view, const DecodedRows<BF16>& out) {
  decode_fp4_rows<kBlock>(view, block_decoders().mxfp4_blocks, out);
}
void decode_mxfp4(const ConstMxfp4View& view, const DecodedRows<double>& out) {
  decode_fp4_rows<kBlock>(view, out);
}

}  // namespace distmoe
