// SPDX-License-Identifier: Apache-2.0
//
// Tensors of Python as views: of PyTorch by the C exchange of DLPack (a call of some nanoseconds
// that holds nothing), of everything else by its __dlpack__ method, whose result is held until the
// argument is destroyed.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "distmoe/tensor.hpp"

namespace distmoe::python {

enum class Access { kRead, kWritten };

/// The bits of an array of another type: what Python's side has no type for.
struct Reinterpreted {
  nanobind::object array;
  DType dtype = DType::kBF16;
};

/// A tensor without memory: what is checked, and what every call refuses.
struct TensorShape {
  TensorView view;
};

/// A CUDA stream by its address, which is how Python names one.
inline void* stream_of(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

/// Raises invalid_argument for a name that no DType has.
DType dtype_of(const std::string& name);

/// A row-major view without memory; invalid_argument for dimensions that no tensor has.
TensorView make_view(DType dtype, const std::vector<std::int64_t>& shape);

/// Views `tensor` while it exists. Made, used and destroyed by a thread that holds the GIL; the
/// view itself may be used without it. None makes no view, where `is_optional`.
class TensorArgument {
 public:
  /// `stream`: the CUDA stream on which memory of a GPU will be used.
  TensorArgument(const char* name, nanobind::handle tensor, Access access, std::uintptr_t stream,
                 bool is_optional = false);

  const TensorView& view() const { return view_; }

 private:
  void read(const char* name, nanobind::handle tensor, Access access, std::uintptr_t stream);
  void read_capsule(const char* name, nanobind::handle tensor, Access access,
                    std::uintptr_t stream);

  TensorView view_;
  nanobind::object capsule_;  // its destructor releases the tensor
};

void bind_tensors(nanobind::module_& module);

}  // namespace distmoe::python
