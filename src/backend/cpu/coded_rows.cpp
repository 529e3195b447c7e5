// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/coded_rows.hpp"

#include <algorithm>
#include <cstring>

#include "backend/cpu/elementwise.hpp"
#include "formats/block_format.hpp"

namespace distmoe::cpu {
namespace {

/// The view from a row, or a column, on.
template <typename Code, typename Scale>
BlockScaledView<Code, Scale> moved(BlockScaledView<Code, Scale> view, std::int64_t code_rows,
                                   std::int64_t scale_rows, std::int64_t columns = 0) {
  view.codes += code_rows * view.code_stride + columns;
  view.scales += scale_rows * view.scale_stride + columns;
  return view;
}

Mxfp8View packed_mxfp8(std::byte* packed, const PackedRowLayout& layout) {
  return {reinterpret_cast<E4M3*>(packed), reinterpret_cast<E8M0*>(packed + layout.scales), 0, 0};
}

Nvfp4View packed_nvfp4(std::byte* packed, const PackedRowLayout& layout) {
  return {reinterpret_cast<std::uint8_t*>(packed), reinterpret_cast<E4M3*>(packed + layout.scales),
          0, 0};
}

}  // namespace

// ---- Rows quantised along the row

CodedRows::CodedRows(Precision precision, std::byte* region, std::int64_t num_rows,
                     std::int64_t width)
    : precision_(precision), width_(width) {
  if (precision == Precision::kNVFP4) {
    nvfp4_ = nvfp4_rows_region(region, num_rows, width);
  } else {
    mxfp8_ = mxfp8_region(region, BlockShape::kRows, num_rows, width);
  }
}

Mxfp8View CodedRows::mxfp8_at(std::int64_t row) const { return moved(mxfp8_, row, row); }
Nvfp4View CodedRows::nvfp4_at(std::int64_t row) const { return moved(nvfp4_.view, row, row); }

void CodedRows::encode(const BF16Rows& values, std::int64_t row) const {
  if (precision_ == Precision::kNVFP4) {
    quantise_nvfp4_rows(values, nvfp4_at(row), nvfp4_.factors + row);
  } else {
    quantise_mxfp8_rows(values, mxfp8_at(row));
  }
}

void CodedRows::unpack(const std::byte* packed, std::int64_t row) const {
  const PackedRowLayout layout(precision_, width_);
  const auto bytes = [](std::int64_t count) { return static_cast<std::size_t>(count); };
  if (precision_ == Precision::kNVFP4) {
    const Nvfp4View view = nvfp4_at(row);
    std::memcpy(view.codes, packed, bytes(code_bytes()));
    std::memcpy(nvfp4_.factors + row, packed + layout.factor, sizeof(float));
    std::memcpy(view.scales, packed + layout.scales, bytes(scale_bytes()));
  } else {
    const Mxfp8View view = mxfp8_at(row);
    std::memcpy(view.codes, packed, bytes(code_bytes()));
    std::memcpy(view.scales, packed + layout.scales, bytes(scale_bytes()));
  }
}

void CodedRows::decode(std::int64_t first, std::int64_t count, BF16* out) const {
  const DecodedRows<BF16> rows{out, count, width_, width_};
  if (precision_ == Precision::kNVFP4) {
    decode_nvfp4(nvfp4_at(first), rows);
  } else {
    decode_mxfp8(mxfp8_at(first), BlockShape::kRows, rows);
  }
}

std::int64_t CodedRows::code_bytes() const {
  return block_format_of(precision_).code_bytes(width_);
}
std::int64_t CodedRows::scale_bytes() const {
  return block_format_of(precision_).num_scales(width_);
}
const std::uint8_t* CodedRows::codes(std::int64_t row) const {
  return precision_ == Precision::kNVFP4
             ? nvfp4_at(row).codes
             : reinterpret_cast<const std::uint8_t*>(mxfp8_at(row).codes);
}
const std::uint8_t* CodedRows::scales(std::int64_t row) const {
  return precision_ == Precision::kNVFP4
             ? reinterpret_cast<const std::uint8_t*>(nvfp4_at(row).scales)
             : reinterpret_cast<const std::uint8_t*>(mxfp8_at(row).scales);
}

void pack_row(Precision precision, const BF16* row, std::int64_t width, std::byte* packed) {
  const PackedRowLayout layout(precision, width);
  const BF16Rows values{row, 1, width, width};
  if (precision == Precision::kNVFP4) {
    float factor = 0.0F;
    quantise_nvfp4_rows(values, packed_nvfp4(packed, layout), &factor);
    std::memcpy(packed + layout.factor, &factor, sizeof(factor));
  } else {
    quantise_mxfp8_rows(values, packed_mxfp8(packed, layout));
  }
}

// ---- Rows quantised across them

CodedColumns::CodedColumns(std::byte* region, std::int64_t num_rows, std::int64_t width)
    : view_(mxfp8_region(region, BlockShape::kColumns, num_rows, width)) {}

void CodedColumns::encode(const BF16Rows& values, std::int64_t row) const {
  quantise_mxfp8_columns(values, moved(view_, row, row / kMxfp8BlockSize));
}

void CodedColumns::decode(const RowRange& rows, std::int64_t first_column, std::int64_t num_columns,
                          BF16* out) const {
  decode_mxfp8(moved(view_, rows.begin, rows.begin / kMxfp8BlockSize, first_column),
               BlockShape::kColumns, {out, rows.size(), num_columns, num_columns});
}

// ---- Operands

MatrixView RowOperand::rows(std::int64_t first, std::int64_t count,
                            const Workspace& workspace) const {
  if (dense_.data != nullptr) return {dense_.row(first), count, width_};
  coded_.decode(first, count, workspace.decoded_rows);
  return {workspace.decoded_rows, count, width_};
}

void RowOperand::scale_sums(std::int64_t first, std::int64_t count, float weight_factor,
                            float* sums, std::int64_t num_columns) const {
  if (!coded_.has_factors()) return;
  for (std::int64_t row = 0; row < count; ++row) {
    scale_twice(sums + row * num_columns, coded_.result_factor(first + row), weight_factor,
                num_columns);
  }
}

RowSlab DepthOperand::slab(const RowRange& rows, std::int64_t first_column,
                           std::int64_t num_columns, BF16* buffer) const {
  if (!is_coded()) {
    return {dense_.row(rows.begin) + first_column, num_columns, dense_.width};
  }
  coded_.decode(rows, first_column, num_columns, buffer);
  return {buffer, num_columns, num_columns};
}

}  // namespace distmoe::cpu
