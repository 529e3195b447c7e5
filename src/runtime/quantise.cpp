// SPDX-License-Identifier: Apache-2.0
//
// The block quantisers for callers: their matrices checked, then the functions of src/formats.
#include "distmoe/quantise.hpp"

#include <algorithm>
#include <memory>
#include <string>

#include "core/allocate_array.hpp"
#include "core/check.hpp"
#include "core/checked_math.hpp"
#include "core/current_error.hpp"
#include "core/float_environment.hpp"
#include "formats/block_format.hpp"
#include "formats/mxfp4.hpp"
#include "formats/mxfp8.hpp"
#include "formats/nvfp4.hpp"
#include "plan/option_names.hpp"
#include "runtime/tensor_check.hpp"

namespace distmoe {
namespace {

void check_host_memory(const char* name, const TensorView& tensor) {
  DISTMOE_CHECK(tensor.device == Device{}, kInvalidArgument, name, " must be in host memory, got ",
                tensor.describe());
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data);
  DISTMOE_CHECK(
      tensor.num_elements() == 0 || (address != 0 && address % size_of(tensor.dtype) == 0),
      kInvalidArgument, name, " lie at ", tensor.data, ", which is no address of ",
      to_string(tensor.dtype));
}

void check_values(const TensorView& values, DType dtype) {
  DISTMOE_CHECK(values.rank == 2, kInvalidArgument, "values must be [R, C], got ",
                values.describe());
  check_dtype("values", values, dtype, dtype);
  check_host_memory("values", values);
}

void check_array(const char* name, const TensorView& array, const TensorView& expected) {
  DISTMOE_CHECK(array.rank == expected.rank && array.shape == expected.shape &&
                    array.dtype == expected.dtype && array.is_contiguous(),
                kInvalidArgument, name, " must be ",
                expected.is_given() ? expected.describe() : std::string("left out"), ", got ",
                array.describe());
  if (expected.is_given()) check_host_memory(name, array);
}

void check_matrix(const QuantisedMatrix& matrix, std::int64_t num_rows, std::int64_t num_columns) {
  const QuantisedMatrix expected =
      quantised_layout(matrix.format, matrix.blocks, num_rows, num_columns);
  check_array("codes", matrix.codes, expected.codes);
  check_array("scales", matrix.scales, expected.scales);
  check_array("factors", matrix.factors, expected.factors);
}

template <typename Code, typename Scale>
BlockScaledView<Code, Scale> view_of(const QuantisedMatrix& matrix) {
  return {static_cast<Code*>(matrix.codes.data), static_cast<Scale*>(matrix.scales.data),
          matrix.codes.shape[1], matrix.scales.shape[1]};
}

void quantise_mxfp8(const BF16Rows& values, const QuantisedMatrix& out) {
  const Mxfp8View view = view_of<E4M3, E8M0>(out);
  switch (out.blocks) {
    case BlockShape::kRows: return quantise_mxfp8_rows(values, view);
    case BlockShape::kColumns: return quantise_mxfp8_columns(values, view);
    default: return quantise_mxfp8_tiles(values, view);
  }
}

/// code * scale, exact.
void decode(const QuantisedMatrix& matrix, const DecodedRows<double>& out) {
  switch (matrix.format) {
    case Precision::kMXFP8: return decode_mxfp8(view_of<E4M3, E8M0>(matrix), matrix.blocks, out);
    case Precision::kMXFP4: return decode_mxfp4(view_of<std::uint8_t, E8M0>(matrix), out);
    default: return decode_nvfp4(view_of<std::uint8_t, E4M3>(matrix), out);
  }
}

/// Row `row` of an array of bytes.
TensorView row_of(TensorView array, std::int64_t row) {
  array.data = static_cast<std::uint8_t*>(array.data) + row * array.shape[1];
  return array;
}

/// The rows from `first` on, which begins a block.
QuantisedMatrix rows_from(const QuantisedMatrix& matrix, std::int64_t first) {
  QuantisedMatrix rest = matrix;
  rest.codes = row_of(matrix.codes, first);
  rest.scales =
      row_of(matrix.scales, matrix.blocks == BlockShape::kRows ? first : first / kMxfp8BlockSize);
  return rest;
}

QuantisedMatrix layout_of(Precision format, BlockShape blocks, std::int64_t num_rows,
                          std::int64_t num_columns) {
  DISTMOE_CHECK(
      format == Precision::kMXFP8 || format == Precision::kMXFP4 || format == Precision::kNVFP4,
      kInvalidArgument, "the format of a quantised matrix is ", option_name(format),
      "; legal are mxfp8, mxfp4 and nvfp4");
  DISTMOE_CHECK(blocks == BlockShape::kRows || format == Precision::kMXFP8, kInvalidArgument,
                option_name(format), " has blocks of rows alone; columns and tiles are MXFP8's");
  DISTMOE_CHECK(num_rows >= 0 && num_columns >= 0, kInvalidArgument,
                "a matrix to quantise cannot be [", num_rows, ", ", num_columns, "]");
  const BlockFormat counts = block_format_of(format);
  QuantisedMatrix matrix{.format = format, .blocks = blocks};
  matrix.codes = {nullptr,
                  format == Precision::kMXFP8 ? DType::kF8E4M3 : DType::kU8,
                  {num_rows, counts.code_bytes(num_columns)}};
  matrix.scales = {nullptr,
                   format == Precision::kNVFP4 ? DType::kF8E4M3 : DType::kF8E8M0,
                   {blocks == BlockShape::kRows ? num_rows : counts.num_scales(num_rows),
                    blocks == BlockShape::kColumns ? num_columns : counts.num_scales(num_columns)}};
  if (counts.has_factors()) matrix.factors = {nullptr, DType::kF32, {num_rows}};
  return matrix;
}

void check_and_quantise(const TensorView& values, const QuantisedMatrix& out) {
  check_values(values, DType::kBF16);
  check_row_major("values", values);
  check_matrix(out, values.shape[0], values.shape[1]);
  if (values.num_elements() == 0) return;
  const BF16Rows rows{.data = static_cast<const BF16*>(values.data),
                      .num_rows = values.shape[0],
                      .num_cols = values.shape[1],
                      .row_stride = values.strides[0]};
  switch (out.format) {
    case Precision::kMXFP8: return quantise_mxfp8(rows, out);
    case Precision::kMXFP4: return quantise_mxfp4(rows, view_of<std::uint8_t, E8M0>(out));
    default:
      return quantise_nvfp4_rows(rows, view_of<std::uint8_t, E4M3>(out),
                                 static_cast<float*>(out.factors.data));
  }
}

void check_and_dequantise(const QuantisedMatrix& matrix, const TensorView& values) {
  check_values(values, DType::kF32);
  check_contiguous("values", values);
  const std::int64_t rows = values.shape[0];
  const std::int64_t columns = values.shape[1];
  check_matrix(matrix, rows, columns);
  if (values.num_elements() == 0) return;
  const auto* factors = static_cast<const float*>(matrix.factors.data);
  auto* out = static_cast<float*>(values.data);
  const std::unique_ptr<double[]> band =
      allocate_array<double>(checked_mul(kMxfp8BlockSize, columns), "decoded rows");
  for (std::int64_t first = 0; first < rows; first += kMxfp8BlockSize) {
    const std::int64_t count = std::min<std::int64_t>(kMxfp8BlockSize, rows - first);
    decode(rows_from(matrix, first), {band.get(), count, columns, columns});
    for (std::int64_t i = 0; i < count * columns; ++i) {
      const double value = band[i];
      const double divisor = factors == nullptr ? 1.0 : factors[first + i / columns];
      out[first * columns + i] = static_cast<float>(value / divisor);
    }
  }
}

}  // namespace

QuantisedMatrix quantised_layout(Precision format, BlockShape blocks, std::int64_t num_rows,
                                 std::int64_t num_columns) {
  return only_errors("the layout of a quantised matrix",
                     [&] { return layout_of(format, blocks, num_rows, num_columns); });
}

void quantise(const TensorView& values, const QuantisedMatrix& out) {
  const DefaultFloatEnvironment environment;
  only_errors("quantising a matrix", [&] { check_and_quantise(values, out); });
}

void dequantise(const QuantisedMatrix& matrix, const TensorView& values) {
  const DefaultFloatEnvironment environment;
  only_errors("decoding a matrix", [&] { check_and_dequantise(matrix, values); });
}

}  // namespace distmoe
