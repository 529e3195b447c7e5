// SPDX-License-Identifier: Apache-2.0
#include "owned_array.hpp"

#include <nanobind/ndarray.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "errors.hpp"

namespace nb = nanobind;

namespace distmoe::python {

nb::capsule allocate(TensorView& view) {
  auto memory = std::make_unique_for_overwrite<std::byte[]>(view.num_bytes() + 1);
  view.data = memory.get();
  return {memory.release(), [](void* bytes) noexcept { delete[] static_cast<std::byte*>(bytes); }};
}

nb::object array_of(const TensorView& view, const nb::object& owner) {
  if (!view.is_given()) return nb::none();
  const std::vector<std::size_t> shape(view.shape.begin(), view.shape.begin() + view.rank);
  const std::vector<std::int64_t> strides(view.strides.begin(), view.strides.begin() + view.rank);
  const auto dtype = view.dtype == DType::kF32 ? nb::dtype<float>() : nb::dtype<std::uint8_t>();
  return nb::cast(nb::ndarray<nb::array_api>(view.data, shape.size(), shape.data(), owner,
                                             strides.data(), dtype));
}

TensorView as_bits(const std::string& name, TensorView view, DType dtype) {
  if (view.dtype != DType::kU8 && view.dtype != dtype) {
    throw Error(ErrorCode::kInvalidArgument, concat(name, " must be uint8, the bits of ",
                                                    to_string(dtype), ", got ", view.describe()));
  }
  view.dtype = dtype;
  return view;
}

}  // namespace distmoe::python
