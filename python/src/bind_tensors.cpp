// SPDX-License-Identifier: Apache-2.0
//
// What takes a tensor's place in calls: TensorShape and Reinterpreted.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "errors.hpp"
#include "tensor_argument.hpp"

namespace nb = nanobind;

namespace distmoe::python {
namespace {

TensorShape make_shape(const std::string& dtype, const std::vector<std::int64_t>& shape,
                       const std::vector<std::int64_t>& strides, int cuda_device) {
  TensorView view = make_view(dtype_of(dtype), shape);
  if (cuda_device >= 0) view.device = {DeviceType::kCuda, cuda_device};
  if (strides.size() != shape.size()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        concat("a tensor of ", shape.size(), " dimensions was given ", strides.size(), " strides"));
  }
  std::ranges::copy(strides, view.strides.begin());
  return {view};
}

template <typename Extents>
std::vector<std::int64_t> extents_of(const TensorView& view, const Extents& extents) {
  return {extents.begin(), extents.begin() + view.rank};
}

/// What copy and pickle make another of: the class and the arguments, which are fields of `self`.
nb::tuple made_again(nb::handle self, std::initializer_list<const char*> fields) {
  nb::list arguments;
  for (const char* field : fields) arguments.append(self.attr(field));
  return nb::make_tuple(self.type(), nb::tuple(arguments));
}

}  // namespace

void bind_tensors(nb::module_& module) {
  nb::class_<TensorShape>(module, "TensorShape",
                          "A tensor without memory, for check_routed_experts: `dtype` by the name "
                          "that messages have, `cuda_device` -1 on the CPU.")
      .def(
          "__init__",
          [](TensorShape* self, const std::string& dtype, const std::vector<std::int64_t>& shape,
             const std::vector<std::int64_t>& strides, int cuda_device) {
            new (self) TensorShape{make_shape(dtype, shape, strides, cuda_device)};
          },
          nb::arg("dtype"), nb::arg("shape"), nb::arg("strides"), nb::arg("cuda_device") = -1)
      .def_prop_ro("dtype", [](const TensorShape& self) { return to_string(self.view.dtype); })
      .def_prop_ro("shape",
                   [](const TensorShape& self) { return extents_of(self.view, self.view.shape); })
      .def_prop_ro("strides",
                   [](const TensorShape& self) { return extents_of(self.view, self.view.strides); })
      .def_prop_ro("cuda_device",
                   [](const TensorShape& self) {
                     return self.view.device.type == DeviceType::kCuda ? self.view.device.index
                                                                       : -1;
                   })
      .def("__reduce__", [](nb::handle self) {
        return made_again(self, {"dtype", "shape", "strides", "cuda_device"});
      });
  nb::class_<Reinterpreted>(module, "Reinterpreted",
                            "An array whose bits are of another type of the same size: "
                            "`Reinterpreted(a, 'bf16')` with an "
                            "array of uint16. Takes the array's place in every call.")
      .def(
          "__init__",
          [](Reinterpreted* self, nb::object array, const std::string& dtype) {
            new (self) Reinterpreted{std::move(array), dtype_of(dtype)};
          },
          nb::arg("array"), nb::arg("dtype"))
      .def_ro("array", &Reinterpreted::array)
      .def_prop_ro("dtype", [](const Reinterpreted& self) { return to_string(self.dtype); })
      .def("__reduce__", [](nb::handle self) {
        return made_again(self, {"array", "dtype"});
      });
}

}  // namespace distmoe::python
