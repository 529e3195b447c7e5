// SPDX-License-Identifier: Apache-2.0
#include "io/coded_loader.hpp"

#include <cstring>
#include <span>

#include "core/check.hpp"
#include "core/checked_math.hpp"
#include "formats/block_format.hpp"
#include "formats/fp8_blocks.hpp"
#include "io/expert_loader.hpp"
#include "io/stored_scales.hpp"

namespace distmoe {
namespace {

using Bytes = std::span<const std::byte>;

/// What a matrix becomes when its codes are loaded with these blocks.
StoredFormat coded_format_of(const MatrixRef& matrix, std::int64_t expert, BlockShape blocks) {
  DISTMOE_CHECK(matrix.format != StoredFormat::kBF16, kUnsupported, matrix.values.describe(),
                ", expert ", expert, ", is ", matrix.values.tensor->describe(),
                ", which has no codes");
  DISTMOE_CHECK(blocks == BlockShape::kRows || matrix.format == StoredFormat::kFp8Blocks,
                kUnsupported, matrix.values.describe(), ", expert ", expert,
                ", has scales of single rows; training needs those of tiles of 32 x 32");
  return matrix.format == StoredFormat::kFp8Blocks ? StoredFormat::kMxfp8 : matrix.format;
}

/// Rows that share a row of scales.
std::int64_t rows_of(BlockShape blocks) {
  return blocks == BlockShape::kTiles ? kMxfp8BlockSize : 1;
}

/// Bytes of one matrix [rows, cols].
struct CodedBytes {
  std::int64_t code_row = 0;
  std::int64_t scale_row = 0;
  std::int64_t codes = 0;
  std::int64_t scales = 0;
};

CodedBytes bytes_of(StoredFormat format, BlockShape blocks, std::int64_t rows, std::int64_t cols) {
  const BlockFormat counts = block_format_of(precision_of(format));
  const std::int64_t code_row = counts.code_bytes(cols);
  const std::int64_t scale_row = counts.num_scales(cols);
  return {code_row, scale_row, checked_mul(rows, code_row),
          checked_mul(rows / rows_of(blocks), scale_row)};
}

/// Where the codes and scales of one matrix go.
struct CodedTarget {
  std::byte* codes;
  std::byte* scales;
  float* global_scale;
};

/// A scale of 128 x 128 elements becomes 128 x 4 equal scale bytes, or those of 4 x 4 tiles, if it
/// is a power of two.
void expand_fp8_scales(const MatrixRef& matrix, std::int64_t expert, BlockShape blocks,
                       std::byte* out) {
  const std::vector<float> scales = read_fp8_scales(matrix.scales, expert);
  const std::int64_t rows = matrix.values.tensor->shape[0];
  const std::int64_t cols = matrix.values.tensor->shape[1];
  DISTMOE_CHECK(cols % kMxfp8BlockSize == 0, kUnsupported, matrix.values.describe(), ", expert ",
                expert, ", has ", cols, " columns; MXFP8 needs a multiple of ", kMxfp8BlockSize);
  const std::int64_t step = rows_of(blocks);
  DISTMOE_CHECK(rows % step == 0, kUnsupported, matrix.values.describe(), ", expert ", expert,
                ", has ", rows, " rows; tiles need a multiple of ", step);
  const std::int64_t scale_cols = matrix.scales.tensor->shape[1];
  for (std::int64_t row = 0; row < rows; row += step) {
    for (std::int64_t block = 0; block < cols / kMxfp8BlockSize; ++block) {
      const std::int64_t scale_row = row / kFp8BlockSize;
      const std::int64_t scale_col = block * kMxfp8BlockSize / kFp8BlockSize;
      const float scale = scales[static_cast<std::size_t>(scale_row * scale_cols + scale_col)];
      const E8M0 byte = to_e8m0_round_up(scale);
      DISTMOE_CHECK(scale > 0.0f && to_float(byte) == scale, kUnsupported, "scale [", scale_row,
                    ", ", scale_col, "] of ", matrix.scales.describe(), ", expert ", expert,
                    ", is ", scale, "; FP8 becomes MXFP8 exactly where scales are powers of two");
      *out++ = std::byte{byte.bits};
    }
  }
}

/// A matrix of its own tensors.
void load_matrix(const MatrixRef& matrix, std::int64_t expert, BlockShape blocks,
                 const CodedTarget& out) {
  const Bytes codes = matrix.values.tensor->data;
  if (!codes.empty()) std::memcpy(out.codes, codes.data(), codes.size());
  if (matrix.format == StoredFormat::kFp8Blocks) {
    expand_fp8_scales(matrix, expert, blocks, out.scales);
    return;
  }
  const Bytes scales = read_scale_bytes(matrix, expert);
  if (!scales.empty()) std::memcpy(out.scales, scales.data(), scales.size());
  if (matrix.format == StoredFormat::kNvfp4) *out.global_scale = read_global_scale(matrix, expert);
}

/// One expert's slice of a fused MXFP4 tensor [E, rows, ...]; row r goes to row_of(r).
template <typename RowOf>
void load_fused(const MatrixRef& matrix, std::int64_t expert, const CodedBytes& bytes,
                const CodedTarget& out, RowOf row_of) {
  const Bytes codes = slice_of_expert(matrix.values, expert);
  const Bytes scales = read_scale_bytes(matrix, expert);
  const std::int64_t rows = matrix.scales.tensor->shape[1];
  for (std::int64_t row = 0; row < rows; ++row) {
    std::memcpy(out.codes + row_of(row) * bytes.code_row, codes.data() + row * bytes.code_row,
                static_cast<std::size_t>(bytes.code_row));
    std::memcpy(out.scales + row_of(row) * bytes.scale_row, scales.data() + row * bytes.scale_row,
                static_cast<std::size_t>(bytes.scale_row));
  }
}

/// Null where the format has none.
float* global_scale(const CodedWeight& matrix, std::int64_t index) {
  auto* scales = reinterpret_cast<float*>(matrix.global_scales.data());
  return scales == nullptr ? nullptr : scales + index;
}

StoredFormat common_format(const LayerTensors& tensors, const ExpertRange& range,
                           BlockShape blocks) {
  // A rank without experts has the format of the others.
  if (range.count == 0) return common_format(tensors, {0, 1}, blocks);
  if (tensors.layout != ExpertLayout::kPerExpert) {
    return coded_format_of(tensors.gate_up, range.first, blocks);
  }
  StoredFormat format = StoredFormat::kMxfp8;
  for (std::int64_t expert = range.first; expert < range.first + range.count; ++expert) {
    const PerExpertTensors& own = tensors.experts[static_cast<std::size_t>(expert)];
    for (const MatrixRef* matrix : {&own.gate, &own.up, &own.down}) {
      const StoredFormat other = coded_format_of(*matrix, expert, blocks);
      if (expert == range.first && matrix == &own.gate) format = other;
      DISTMOE_CHECK(other == format, kUnsupported, matrix->values.describe(), ", expert ", expert,
                    ", is coded otherwise than the first of its layer");
    }
  }
  return format;
}

}  // namespace

CodedExperts load_coded_experts(const LayerTensors& tensors, const LayerShape& shape,
                                const ExpertRange& range, BlockShape blocks) {
  const std::int64_t d = shape.hidden_dim;
  const std::int64_t f = shape.intermediate_dim;
  CodedExperts experts;
  static_cast<ExpertBiases&>(experts) = load_biases(tensors, shape, range);
  experts.blocks = blocks;
  experts.format = common_format(tensors, range, blocks);

  const CodedBytes gate = bytes_of(experts.format, blocks, f, d);
  const CodedBytes down = bytes_of(experts.format, blocks, d, f);
  const std::int64_t factor_bytes = block_format_of(precision_of(experts.format)).factor_bytes;
  const auto allocate = [&](CodedWeight& matrix, std::int64_t codes, std::int64_t scales,
                            std::int64_t global_scales, const char* what) {
    const auto size = [&](std::int64_t bytes) {
      return static_cast<std::size_t>(checked_mul(range.count, bytes));
    };
    matrix.codes = TensorStorage(size(codes), what);
    matrix.scales = TensorStorage(size(scales), what);
    matrix.global_scales = TensorStorage(size(global_scales * factor_bytes), what);
  };
  allocate(experts.w13, checked_mul(2, gate.codes), checked_mul(2, gate.scales), 2, "W13");
  allocate(experts.w2, down.codes, down.scales, 1, "W2");

  for (std::int64_t local = 0; local < range.count; ++local) {
    const std::int64_t expert = range.first + local;
    std::byte* codes13 = experts.w13.codes.data() + local * 2 * gate.codes;
    std::byte* scales13 = experts.w13.scales.data() + local * 2 * gate.scales;
    const CodedTarget gate_out{codes13, scales13, global_scale(experts.w13, 2 * local)};
    const CodedTarget up_out{codes13 + gate.codes, scales13 + gate.scales,
                             global_scale(experts.w13, 2 * local + 1)};
    const CodedTarget down_out{experts.w2.codes.data() + local * down.codes,
                               experts.w2.scales.data() + local * down.scales,
                               global_scale(experts.w2, local)};
    if (tensors.layout == ExpertLayout::kPerExpert) {
      const PerExpertTensors& own = tensors.experts[static_cast<std::size_t>(expert)];
      load_matrix(own.gate, expert, blocks, gate_out);
      load_matrix(own.up, expert, blocks, up_out);
      load_matrix(own.down, expert, blocks, down_out);
    } else {
      load_fused(tensors.gate_up, expert, gate, gate_out,
                 [f](std::int64_t row) { return concatenated_row(row, f); });
      load_fused(tensors.down, expert, down, down_out, [](std::int64_t row) { return row; });
    }
  }
  return experts;
}

}  // namespace distmoe
