// SPDX-License-Identifier: Apache-2.0
#include "formats/mxfp8.hpp"

#include <algorithm>
#include <array>

#include "core/checked_math.hpp"
#include "core/simd.hpp"
#include "formats/block_decoders.hpp"
#include "formats/block_encoders.hpp"
#include "formats/block_runs.hpp"

namespace distmoe {
namespace {

constexpr std::int64_t kBlock = kMxfp8BlockSize;
/// Columns that are quantised together: their 32 rows stay in a core's second cache, and each row
/// is long enough that the processor foresees the reading and writing of memory.
constexpr std::int64_t kSlab = 4096;
constexpr std::array<BF16, kSlab> kZeros{};

DISTMOE_SIMD_CLONES void find_scales(const BF16* amax, std::int64_t count, E8M0* scales) {
  for (std::int64_t i = 0; i < count; ++i) scales[i] = mxfp8_scale(to_float(amax[i]));
}

/// `next_row` is null or what is quantised afterwards.
void quantise_row(const BlockEncoders& encoders, const BF16* values, const BF16* next_row,
                  std::int64_t num_cols, const Mxfp8View& out) {
  E4M3* codes = out.codes;
  E8M0* scales = out.scales;
  for_each_run<kBlock>(encoders, values, num_cols, [&](const BlockRun& run) {
    prefetch_run<kBlock>(next_row, run);
    const std::int64_t first = run.begin / kBlock;
    find_scales(run.amax, run.num_blocks, scales + first);
    encoders.e4m3_blocks(values + run.begin, run.num_whole_blocks, scales + first,
                         codes + run.begin);
    if (run.num_rest > 0) {
      const std::int64_t rest = run.begin + run.num_whole_blocks * kBlock;
      std::array<E8M0, kBlock> of_rest{};
      of_rest.fill(scales[rest / kBlock]);
      encoders.e4m3_columns(values + rest, run.num_rest, of_rest.data(), codes + rest);
    }
  });
}

/// 32 rows, or as many as there are, of `num_cols` <= kSlab columns.
struct Band {
  RowsToEncode in_memory;
  RowsToEncode padding;  ///< zeros behind them
  std::int64_t num_cols = 0;
};

/// As BF16 without a sign, one for each column.
DISTMOE_SIMD_CLONES void find_amax(const Band& band, BF16* amax) {
  for (std::int64_t row = 0; row < band.in_memory.num_rows; ++row) {
    const BF16* values = band.in_memory.values + row * band.in_memory.row_stride;
    for (std::int64_t col = 0; col < band.num_cols; ++col) {
      amax[col].bits = std::max(amax[col].bits, magnitude_bits(values[col]));
    }
  }
}

/// `scales` has one for each column.
void encode_band(const BlockEncoders& encoders, const Band& band, const E8M0* scales) {
  encoders.e4m3_rows(band.in_memory, band.num_cols, scales);
  encoders.e4m3_rows(band.padding, band.num_cols, scales);
}

/// The slab of rows in memory that is walked after that at (row, col).
BF16Rows slab_behind(const BF16Rows& values, std::int64_t row, std::int64_t col) {
  col += kSlab;
  if (col >= values.num_cols) {
    col = 0;
    row += kBlock;
  }
  if (row >= values.num_rows) return {};
  return {values.data + row * values.row_stride + col, std::min(kBlock, values.num_rows - row),
          std::min(kSlab, values.num_cols - col), values.row_stride};
}

/// Walks the bands of 32 rows, and in each of them slabs of columns.
template <typename Visit>
void for_each_band(const BF16Rows& values, const Mxfp8View& out, const Visit& visit) {
  const std::int64_t num_rows = values.num_rows + values.num_padding_rows;
  for (std::int64_t row = 0; row < num_rows; row += kBlock) {
    const std::int64_t rows = std::min(kBlock, num_rows - row);
    const std::int64_t in_memory = std::clamp(values.num_rows - row, std::int64_t{0}, rows);
    for (std::int64_t col = 0; col < values.num_cols; col += kSlab) {
      E4M3* codes = out.codes + row * out.code_stride + col;
      const BF16* first =
          in_memory > 0 ? values.data + row * values.row_stride + col : kZeros.data();
      const Band band{{first, values.row_stride, in_memory, codes, out.code_stride,
                       slab_behind(values, row, col)},
                      {kZeros.data(), 0, rows - in_memory, codes + in_memory * out.code_stride,
                       out.code_stride},
                      std::min(kSlab, values.num_cols - col)};
      visit(band, out.scales + row / kBlock * out.scale_stride, col);
    }
  }
}

/// A stretch of one row with one scale.
template <typename Value>
inline __attribute__((always_inline)) void decode_run(const E4M3* codes, E8M0 scale,
                                                      std::int64_t count, Value* out) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = decoded<Value>(codes[i], scale);
}

template <typename Value>
inline __attribute__((always_inline)) void decode_along_row(const E4M3* codes, const E8M0* scales,
                                                            std::int64_t num_cols, Value* out) {
  std::int64_t col = 0;
  for (; col + kBlock <= num_cols; col += kBlock) {
    decode_run(codes + col, *scales++, kBlock, out + col);
  }
  if (col < num_cols) decode_run(codes + col, *scales, num_cols - col, out + col);
}

template <typename Value>
inline __attribute__((always_inline)) void decode_across_columns(const E4M3* codes,
                                                                 const E8M0* scales,
                                                                 std::int64_t num_cols,
                                                                 Value* out) {
  for (std::int64_t col = 0; col < num_cols; ++col)
    out[col] = decoded<Value>(codes[col], scales[col]);
}

void decode_row(BlockShape shape, const E4M3* codes, const E8M0* scales, std::int64_t num_cols,
                BF16* out) {
  const BlockDecoders& decoders = block_decoders();
  if (shape == BlockShape::kColumns) {
    decoders.e4m3_columns(codes, num_cols, scales, out);
    return;
  }
  const std::int64_t num_blocks = num_cols / kBlock;
  const std::int64_t whole = num_blocks * kBlock;
  decoders.e4m3_blocks(codes, num_blocks, scales, out);
  if (whole < num_cols)
    decode_run(codes + whole, scales[num_blocks], num_cols - whole, out + whole);
}

void decode_row(BlockShape shape, const E4M3* codes, const E8M0* scales, std::int64_t num_cols,
                double* out) {
  if (shape == BlockShape::kColumns) return decode_across_columns(codes, scales, num_cols, out);
  decode_along_row(codes, scales, num_cols, out);
}

template <typename Value>
void decode(const ConstMxfp8View& view, BlockShape shape, const DecodedRows<Value>& out) {
  for (std::int64_t row = 0; row < out.num_rows; ++row) {
    const std::int64_t scale_row = shape == BlockShape::kRows ? row : row / kBlock;
    decode_row(shape, view.codes + row * view.code_stride,
               view.scales + scale_row * view.scale_stride, out.num_cols,
               out.data + row * out.row_stride);
  }
}

std::int64_t code_bytes(std::int64_t num_rows, std::int64_t num_cols) {
  return align_up(checked_mul(num_rows, num_cols));
}
std::int64_t scale_row_bytes(BlockShape shape, std::int64_t num_cols) {
  return shape == BlockShape::kColumns ? num_cols : ceil_div(num_cols, kBlock);
}

}  // namespace

void quantise_mxfp8_rows(const BF16Rows& values, const Mxfp8View& out) {
  const BlockEncoders& encoders = block_encoders();
  for (std::int64_t row = 0; row < values.num_rows; ++row) {
    const BF16* own = values.data + row * values.row_stride;
    quantise_row(encoders, own, row + 1 < values.num_rows ? own + values.row_stride : nullptr,
                 values.num_cols,
                 {out.codes + row * out.code_stride, out.scales + row * out.scale_stride});
  }
  zero_padding_rows(values, out, values.num_cols, ceil_div(values.num_cols, kBlock));
}

void quantise_mxfp8_columns(const BF16Rows& values, const Mxfp8View& out) {
  const BlockEncoders& encoders = block_encoders();
  for_each_band(values, out, [&](const Band& band, E8M0* scales, std::int64_t col) {
    std::array<BF16, kSlab> amax{};
    find_amax(band, amax.data());
    find_scales(amax.data(), band.num_cols, scales + col);
    encode_band(encoders, band, scales + col);
  });
}

void quantise_mxfp8_tiles(const BF16Rows& values, const Mxfp8View& out) {
  const BlockEncoders& encoders = block_encoders();
  for_each_band(values, out, [&](const Band& band, E8M0* scales, std::int64_t col) {
    std::array<BF16, kSlab> amax{};
    find_amax(band, amax.data());
    for_each_run<kBlock>(encoders, amax.data(), band.num_cols, [&](const BlockRun& run) {
      find_scales(run.amax, run.num_blocks, scales + (col + run.begin) / kBlock);
    });
    std::array<E8M0, kSlab> of_column{};
    for (std::int64_t begin = 0; begin < band.num_cols; begin += kBlock) {
      std::fill_n(of_column.begin() + begin, std::min(kBlock, band.num_cols - begin),
                  scales[(col + begin) / kBlock]);
    }
    encode_band(encoders, band, of_column.data());
  });
}

void decode_mxfp8(const ConstMxfp8View& view, BlockShape shape, const DecodedRows<BF16>& out) {
  decode(view, shape, out);
}
void decode_mxfp8(const ConstMxfp8View& view, BlockShape shape, const DecodedRows<double>& out) {
  decode(view, shape, out);
}

Mxfp8View mxfp8_region(std::byte* region, BlockShape shape, std::int64_t num_rows,
                       std::int64_t num_cols) {
  return {reinterpret_cast<E4M3*>(region),
          reinterpret_cast<E8M0*>(region + code_bytes(num_rows, num_cols)), num_cols,
          scale_row_bytes(shape, num_cols)};
}

std::int64_t mxfp8_region_bytes(BlockShape shape, std::int64_t num_rows, std::int64_t num_cols) {
  const std::int64_t scale_rows =
      shape == BlockShape::kRows ? num_rows : ceil_div(num_rows, kBlock);
  return code_bytes(num_rows, num_cols) +
         align_up(checked_mul(scale_rows, scale_row_bytes(shape, num_cols)));
}

}  // namespace distmoe
