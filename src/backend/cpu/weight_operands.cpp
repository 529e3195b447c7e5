// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/weight_operands.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "formats/mxfp4.hpp"
#include "formats/mxfp8.hpp"
#include "formats/nvfp4.hpp"

namespace distmoe::cpu {
namespace {

template <typename Element>
Element* as(std::byte* bytes) {
  return reinterpret_cast<Element*>(bytes);
}
template <typename Element>
const Element* as(const std::byte* bytes) {
  return reinterpret_cast<const Element*>(bytes);
}

/// Blocks of an MXFP8 weight: 32 x 32 in training, 1 x 32 in inference.
BlockShape mxfp8_blocks(const Config& config) {
  return config.inference ? BlockShape::kRows : BlockShape::kTiles;
}

}  // namespace

/// Some rows and columns of one matrix, from multiples of 32 on.
struct WeightOperands::Slab {
  std::int64_t first_row = 0;
  std::int64_t num_rows = 0;
  std::int64_t first_column = 0;
  std::int64_t num_columns = 0;
};

const CodedMatrix& WeightOperands::coded(Projection projection) const {
  switch (projection) {
    case Projection::kGate: return experts_.coded_gate;
    case Projection::kUp: return experts_.coded_up;
    case Projection::kDown: break;
  }
  return experts_.coded_w2;
}

/// The whole matrix as it was given.
MatrixView WeightOperands::dense(Projection projection, std::int64_t expert) const {
  if (projection == Projection::kDown) {
    return {experts_.w2 + expert * experts_.w2_expert_stride, config_.hidden_dim,
            experts_.w2_row_stride};
  }
  const BF16* half = projection == Projection::kGate ? experts_.gate : experts_.up;
  return {half + expert * experts_.w13_expert_stride, config_.intermediate_dim,
          experts_.w13_row_stride};
}

std::int64_t WeightOperands::num_columns(Projection projection) const {
  return projection == Projection::kDown ? config_.intermediate_dim : config_.hidden_dim;
}

MatrixView WeightOperands::rows(Projection projection, std::int64_t expert, std::int64_t first,
                                std::int64_t count, const Workspace& workspace) const {
  const std::int64_t columns = num_columns(projection);
  if (!has_codes()) {
    const MatrixView matrix = dense(projection, expert);
    return {matrix.data + first * matrix.row_stride, count, matrix.row_stride};
  }
  decode(projection, expert,
         {.first_row = first, .num_rows = count, .first_column = 0, .num_columns = columns},
         workspace.decoded_weights, workspace);
  return {workspace.decoded_weights, count, columns};
}

DepthRows WeightOperands::w2_columns(std::int64_t expert, std::int64_t first, std::int64_t count,
                                     const Workspace& workspace) const {
  DepthRows columns{.num_rows = config_.hidden_dim, .num_columns = count};
  if (!has_codes()) {
    const MatrixView matrix = dense(Projection::kDown, expert);
    columns.first = matrix.data + first;
    columns.row_stride = matrix.row_stride;
    return columns;
  }
  decode(
      Projection::kDown, expert,
      {.first_row = 0, .num_rows = config_.hidden_dim, .first_column = first, .num_columns = count},
      workspace.decoded_weights, workspace);
  columns.first = workspace.decoded_weights;
  columns.row_stride = count;
  return columns;
}

DepthRows WeightOperands::w13_columns(std::int64_t expert, std::int64_t first, std::int64_t count,
                                      const Workspace& workspace) const {
  const std::int64_t depth = config_.intermediate_dim;
  DepthRows columns{.num_rows = depth, .num_columns = count};
  if (!has_codes()) {
    const MatrixView gate = dense(Projection::kGate, expert);
    columns.first = gate.data + first;
    columns.second = dense(Projection::kUp, expert).data + first;
    columns.row_stride = gate.row_stride;
    return columns;
  }
  const Slab slab{.first_row = 0, .num_rows = depth, .first_column = first, .num_columns = count};
  BF16* gate = workspace.decoded_weights;
  BF16* up = gate + depth * count;
  decode(Projection::kGate, expert, slab, gate, workspace);
  decode(Projection::kUp, expert, slab, up, workspace);
  columns.first = gate;
  columns.second = up;
  columns.row_stride = count;
  return columns;
}

float WeightOperands::result_factor(Projection projection, std::int64_t expert) const {
  const CodedMatrix& matrix = coded(projection);
  return matrix.global_scale == nullptr ? 1.0F
                                        : matrix.global_scale[expert * matrix.global_expert_stride];
}

void WeightOperands::decode(Projection projection, std::int64_t expert, const Slab& slab, BF16* out,
                            const Workspace& workspace) const {
  const CodedMatrix& matrix = coded(projection);
  if (matrix.codes != nullptr) {
    decode_prepared(matrix, expert, slab, out);
  } else {
    quantise_and_decode(dense(projection, expert), slab, out, workspace);
  }
}

void WeightOperands::decode_prepared(const CodedMatrix& matrix, std::int64_t expert,
                                     const Slab& slab, BF16* out) const {
  const DecodedRows<BF16> rows{out, slab.num_rows, slab.num_columns, slab.num_columns};
  const std::byte* codes =
      matrix.codes + expert * matrix.code_expert_stride + slab.first_row * matrix.code_stride;
  const std::byte* scales = matrix.scales + expert * matrix.scale_expert_stride;
  switch (config_.precision) {
    case Precision::kNVFP4:
      return decode_nvfp4(
          {as<std::uint8_t>(codes), as<E4M3>(scales + slab.first_row * matrix.scale_stride),
           matrix.code_stride, matrix.scale_stride},
          rows);
    case Precision::kMXFP4:
      return decode_mxfp4(
          {as<std::uint8_t>(codes), as<E8M0>(scales + slab.first_row * matrix.scale_stride),
           matrix.code_stride, matrix.scale_stride},
          rows);
    default: {
      const BlockShape blocks = mxfp8_blocks(config_);
      const std::int64_t scale_row =
          blocks == BlockShape::kTiles ? slab.first_row / kMxfp8BlockSize : slab.first_row;
      return decode_mxfp8(
          {as<E4M3>(codes) + slab.first_column,
           as<E8M0>(scales + scale_row * matrix.scale_stride) + slab.first_column / kMxfp8BlockSize,
           matrix.code_stride, matrix.scale_stride},
          blocks, rows);
    }
  }
}

void WeightOperands::quantise_and_decode(const MatrixView& matrix, const Slab& slab, BF16* out,
                                         const Workspace& workspace) const {
  for (std::int64_t row = 0; row < slab.num_rows; row += kCpuQuantisedRows) {
    const std::int64_t count = std::min(kCpuQuantisedRows, slab.num_rows - row);
    const BF16Rows values{
        matrix.data + (slab.first_row + row) * matrix.row_stride + slab.first_column, count,
        slab.num_columns, matrix.row_stride};
    const DecodedRows<BF16> rows{out + row * slab.num_columns, count, slab.num_columns,
                                 slab.num_columns};
    std::byte* scales = workspace.codes + kCpuQuantisedRows * slab.num_columns;
    const std::int64_t blocks = slab.num_columns / kMxfp8BlockSize;
    if (config_.precision == Precision::kMXFP4) {
      const Mxfp4View view{as<std::uint8_t>(workspace.codes), as<E8M0>(scales),
                           slab.num_columns / 2, blocks};
      quantise_mxfp4(values, view);
      decode_mxfp4(view, rows);
      continue;
    }
    const Mxfp8View view{as<E4M3>(workspace.codes), as<E8M0>(scales), slab.num_columns, blocks};
    if (config_.inference) {
      quantise_mxfp8_rows(values, view);
    } else {
      quantise_mxfp8_tiles(values, view);
    }
    decode_mxfp8(view, mxfp8_blocks(config_), rows);
  }
}

}  // namespace distmoe::cpu
