// SPDX-License-Identifier: Apache-2.0
//
// The block quantisers: matrices of any library become codes and scales, and values again.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "config_argument.hpp"
#include "distmoe/quantise.hpp"
#include "errors.hpp"
#include "owned_array.hpp"
#include "tensor_argument.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace distmoe::python {
namespace {

BlockShape blocks_of(const std::string& name) {
  if (name == "rows") return BlockShape::kRows;
  if (name == "columns") return BlockShape::kColumns;
  if (name == "tiles") return BlockShape::kTiles;
  throw Error(ErrorCode::kInvalidArgument,
              concat("blocks is '", name, "'; legal is one of rows, columns, tiles"));
}

QuantisedMatrix layout_of(const std::string& format, const std::string& blocks,
                          std::int64_t num_rows, std::int64_t num_columns) {
  return quantised_layout(choice_of<Precision>("format", format), blocks_of(blocks), num_rows,
                          num_columns);
}

/// Codes, scales and factors (None, where the format has none).
using Arrays = std::tuple<nb::object, nb::object, nb::object>;

Arrays quantise_values(nb::handle values, const std::string& format, const std::string& blocks) {
  const TensorArgument tensor("values", values, Access::kRead, 0);
  const TensorView& view = tensor.view();
  QuantisedMatrix made = layout_of(format, blocks, view.shape[0], view.shape[1]);
  const nb::capsule codes = allocate(made.codes);
  const nb::capsule scales = allocate(made.scales);
  const nb::capsule factors = allocate(made.factors);
  {
    const nb::gil_scoped_release release;
    quantise(view, made);
  }
  return {array_of(made.codes, codes), array_of(made.scales, scales),
          array_of(made.factors, factors)};
}

nb::object dequantise_arrays(nb::handle codes, nb::handle scales, nb::handle factors,
                             const std::string& format, const std::string& blocks,
                             std::int64_t num_columns) {
  const TensorArgument coded("codes", codes, Access::kRead, 0);
  const TensorArgument scaled("scales", scales, Access::kRead, 0);
  const TensorArgument divided("factors", factors, Access::kRead, 0, true);
  const std::int64_t num_rows = coded.view().shape[0];
  QuantisedMatrix matrix = layout_of(format, blocks, num_rows, num_columns);
  matrix.codes = as_bits("codes", coded.view(), matrix.codes.dtype);
  matrix.scales = as_bits("scales", scaled.view(), matrix.scales.dtype);
  matrix.factors = divided.view();
  TensorView values{nullptr, DType::kF32, {num_rows, num_columns}};
  const nb::capsule memory = allocate(values);
  {
    const nb::gil_scoped_release release;
    dequantise(matrix, values);
  }
  return array_of(values, memory);
}

/// An array of this module's with these bits: what pickle makes again.
nb::object array_of_bytes(const nb::bytes& bits, const std::vector<std::int64_t>& shape,
                          bool is_float) {
  TensorView view = make_view(is_float ? DType::kF32 : DType::kU8, shape);
  if (bits.size() != view.num_bytes()) {
    throw Error(ErrorCode::kInvalidArgument, concat("bits are ", bits.size(), " bytes; ",
                                                    view.describe(), " has ", view.num_bytes()));
  }
  const nb::capsule memory = allocate(view);
  if (bits.size() > 0) std::memcpy(view.data, bits.c_str(), bits.size());
  return array_of(view, memory);
}

}  // namespace

void bind_quantise(nb::module_& module) {
  module.def("quantise", &quantise_values, "values"_a, "format"_a, "blocks"_a);
  module.def("dequantise", &dequantise_arrays, "codes"_a, "scales"_a, "factors"_a.none(),
             "format"_a, "blocks"_a, "num_columns"_a);
  module.def("array_of_bytes", &array_of_bytes, "bits"_a, "shape"_a, "is_float"_a);
}

}  // namespace distmoe::python
