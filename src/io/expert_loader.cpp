// SPDX-License-Identifier: Apache-2.0
//
// NOTE: the bytes of a file are aligned to nothing, hence memcpy where an element is wider than a
// byte. The destination of each conversion is the final buffer: nothing of a weight's size is held
// in between.
#include "io/expert_loader.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "core/check.hpp"
#include "core/checked_math.hpp"
#include "formats/bf16.hpp"
#include "formats/e4m3.hpp"
#include "formats/e8m0.hpp"
#include "formats/fp8_blocks.hpp"
#include "formats/mxfp4.hpp"
#include "formats/mxfp8.hpp"
#include "formats/nvfp4.hpp"
#include "io/stored_scales.hpp"

namespace distmoe {
namespace {

using Bytes = std::span<const std::byte>;

void copy(Bytes source, void* out) {
  if (!source.empty()) std::memcpy(out, source.data(), source.size());
}

/// Element [row, col] of `source` goes to out[row_of(col), row]; a row of `out` has `rows`
/// elements.
template <typename RowOf>
void transpose(Bytes source, std::int64_t rows, std::int64_t cols, BF16* out, RowOf row_of) {
  constexpr std::int64_t kTile = 64;
  for (std::int64_t row_begin = 0; row_begin < rows; row_begin += kTile) {
    const std::int64_t row_end = std::min(rows, row_begin + kTile);
    for (std::int64_t col_begin = 0; col_begin < cols; col_begin += kTile) {
      const std::int64_t col_end = std::min(cols, col_begin + kTile);
      for (std::int64_t col = col_begin; col < col_end; ++col) {
        BF16* out_row = out + row_of(col) * rows;
        for (std::int64_t row = row_begin; row < row_end; ++row) {
          const auto element = static_cast<std::size_t>(row * cols + col);
          std::memcpy(&out_row[row], &source[element * sizeof(BF16)], sizeof(BF16));
        }
      }
    }
  }
}

/// code * scale * global scale: 8 and 24 significant bits, exact in FP64 and rounded once.
void decode_nvfp4_matrix(const MatrixRef& matrix, std::int64_t expert, BF16* out) {
  const std::int64_t rows = matrix.scales.tensor->shape[0];
  const std::int64_t num_blocks = matrix.scales.tensor->shape[1];
  const auto* codes = reinterpret_cast<const std::uint8_t*>(matrix.values.tensor->data.data());
  const auto* scales = reinterpret_cast<const E4M3*>(read_scale_bytes(matrix, expert).data());
  const auto global = static_cast<double>(read_global_scale(matrix, expert));
  const std::int64_t cols = num_blocks * kNvfp4BlockSize;
  std::vector<double> row_values(static_cast<std::size_t>(cols));
  for (std::int64_t row = 0; row < rows; ++row) {
    decode_nvfp4({codes + row * cols / 2, scales + row * num_blocks},
                 DecodedRows<double>{row_values.data(), 1, cols});
    for (const double value : row_values) *out++ = to_bf16(value * global);
  }
}

/// A matrix of its own tensors.
void load_matrix(const MatrixRef& matrix, std::int64_t expert, BF16* out) {
  const StoredTensor& values = *matrix.values.tensor;
  const std::byte* codes = values.data.data();
  switch (matrix.format) {
    case StoredFormat::kBF16: copy(values.data, out); return;
    case StoredFormat::kFp8Blocks:
      decode_fp8_blocks(reinterpret_cast<const E4M3*>(codes),
                        read_fp8_scales(matrix.scales, expert).data(), values.shape[0],
                        values.shape[1], out);
      return;
    case StoredFormat::kMxfp8: {
      const std::int64_t cols = values.shape[1];
      const auto* scales = reinterpret_cast<const E8M0*>(read_scale_bytes(matrix, expert).data());
      decode_mxfp8({reinterpret_cast<const E4M3*>(codes), scales, cols, cols / kMxfp8BlockSize},
                   BlockShape::kRows, DecodedRows<BF16>{out, values.shape[0], cols, cols});
      return;
    }
    case StoredFormat::kMxfp4: {
      const std::int64_t cols = 2 * values.shape[1];
      const auto* scales = reinterpret_cast<const E8M0*>(read_scale_bytes(matrix, expert).data());
      decode_mxfp4(
          {reinterpret_cast<const std::uint8_t*>(codes), scales, cols / 2, cols / kMxfp4BlockSize},
          DecodedRows<BF16>{out, values.shape[0], cols, cols});
      return;
    }
    case StoredFormat::kNvfp4: decode_nvfp4_matrix(matrix, expert, out); return;
  }
}

/// Rows of an MXFP4 matrix [E, rows, blocks, 16]; row r goes to row_of(r).
template <typename RowOf>
void load_mxfp4(const MatrixRef& matrix, std::int64_t expert, BF16* out, RowOf row_of) {
  const std::int64_t rows = matrix.scales.tensor->shape[1];
  const std::int64_t num_blocks = matrix.scales.tensor->shape[2];
  const Bytes blocks = slice_of_expert(matrix.values, expert);
  const Bytes scales = read_scale_bytes(matrix, expert);
  const auto* block_bytes = reinterpret_cast<const std::uint8_t*>(blocks.data());
  const auto* scale_bytes = reinterpret_cast<const E8M0*>(scales.data());
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t cols = num_blocks * kMxfp4BlockSize;
    decode_mxfp4(
        {block_bytes + row * num_blocks * kMxfp4BlockBytes, scale_bytes + row * num_blocks},
        DecodedRows<BF16>{out + row_of(row) * cols, 1, cols});
  }
}

void load_expert(const LayerTensors& tensors, const LayerShape& shape, std::int64_t expert,
                 BF16* w13, BF16* w2) {
  const std::int64_t d = shape.hidden_dim;
  const std::int64_t f = shape.intermediate_dim;
  const auto same_row = [](std::int64_t row) { return row; };
  const auto gate_up_row = [f](std::int64_t row) { return concatenated_row(row, f); };
  switch (tensors.layout) {
    case ExpertLayout::kPerExpert: {
      const PerExpertTensors& own = tensors.experts[static_cast<std::size_t>(expert)];
      load_matrix(own.gate, expert, w13);
      load_matrix(own.up, expert, w13 + f * d);
      load_matrix(own.down, expert, w2);
      return;
    }
    case ExpertLayout::kFused:
      copy(slice_of_expert(tensors.gate_up.values, expert), w13);
      copy(slice_of_expert(tensors.down.values, expert), w2);
      return;
    case ExpertLayout::kFusedGptOss:
      transpose(slice_of_expert(tensors.gate_up.values, expert), d, 2 * f, w13, gate_up_row);
      transpose(slice_of_expert(tensors.down.values, expert), f, d, w2, same_row);
      return;
    case ExpertLayout::kMxfp4GptOss:
      load_mxfp4(tensors.gate_up, expert, w13, gate_up_row);
      load_mxfp4(tensors.down, expert, w2, same_row);
      return;
  }
}

}  // namespace

ExpertBiases load_biases(const LayerTensors& tensors, const LayerShape& shape,
                         const ExpertRange& range) {
  ExpertBiases experts;
  experts.first_expert = range.first;
  experts.num_experts = range.count;
  experts.hidden_dim = shape.hidden_dim;
  experts.intermediate_dim = shape.intermediate_dim;
  experts.has_bias = shape.has_bias;
  if (!shape.has_bias) return experts;
  experts.bias13_dtype = tensors.gate_up_bias.tensor->known_dtype();
  experts.bias2_dtype = tensors.down_bias.tensor->known_dtype();
  const std::size_t width13 = size_of(experts.bias13_dtype);
  const std::size_t row13_bytes = 2 * static_cast<std::size_t>(experts.intermediate_dim) * width13;
  const std::size_t row2_bytes =
      static_cast<std::size_t>(experts.hidden_dim) * size_of(experts.bias2_dtype);
  const auto count = static_cast<std::size_t>(experts.num_experts);
  experts.bias13 = TensorStorage(count * row13_bytes, "bias13");
  experts.bias2 = TensorStorage(count * row2_bytes, "bias2");
  for (std::int64_t local = 0; local < experts.num_experts; ++local) {
    const std::int64_t expert = experts.first_expert + local;
    const Bytes source = slice_of_expert(tensors.gate_up_bias, expert);
    std::byte* row13 = experts.bias13.data() + static_cast<std::size_t>(local) * row13_bytes;
    for (std::int64_t i = 0; i < 2 * experts.intermediate_dim; ++i) {
      const auto to = static_cast<std::size_t>(concatenated_row(i, experts.intermediate_dim));
      std::memcpy(row13 + to * width13, &source[static_cast<std::size_t>(i) * width13], width13);
    }
    copy(slice_of_expert(tensors.down_bias, expert),
         experts.bias2.data() + static_cast<std::size_t>(local) * row2_bytes);
  }
  return experts;
}

LoadedExperts load_experts(const LayerTensors& tensors, const LayerShape& shape,
                           const ExpertRange& range) {
  LoadedExperts experts;
  static_cast<ExpertBiases&>(experts) = load_biases(tensors, shape, range);
  const std::int64_t w2_size = checked_mul(shape.hidden_dim, shape.intermediate_dim);
  const std::int64_t w2_bytes = checked_product(range.count, w2_size, std::int64_t{sizeof(BF16)});
  experts.w13 = TensorStorage(static_cast<std::size_t>(checked_mul(w2_bytes, 2)), "W13");
  experts.w2 = TensorStorage(static_cast<std::size_t>(w2_bytes), "W2");
  auto* w13 = reinterpret_cast<BF16*>(experts.w13.data());
  auto* w2 = reinterpret_cast<BF16*>(experts.w2.data());
  for (std::int64_t local = 0; local < range.count; ++local) {
    load_expert(tensors, shape, range.first + local, w13 + local * 2 * w2_size,
                w2 + local * w2_size);
  }
  return experts;
}

}  // namespace distmoe
