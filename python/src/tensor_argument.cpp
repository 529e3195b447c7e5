// SPDX-License-Identifier: Apache-2.0
#include "tensor_argument.hpp"

#include <dlpack/dlpack.h>
#include <nanobind/stl/string.h>

#include <exception>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "distmoe/dlpack.hpp"
#include "dlpack1.hpp"
#include "errors.hpp"

namespace nb = nanobind;

namespace distmoe::python {
namespace {

/// The table of DLPack 1 that `type` has, or null. Types that were seen are kept alive, so that an
/// address means one type for good.
const ExchangeTable* exchange_table_of(PyTypeObject* type) {
  static std::unordered_map<PyTypeObject*, const ExchangeTable*> known;
  const auto found = known.find(type);
  if (found != known.end()) return found->second;
  const ExchangeTable* table = nullptr;
  const nb::handle handle(reinterpret_cast<PyObject*>(type));
  if (nb::hasattr(handle, "__dlpack_c_exchange_api__")) {
    const nb::object capsule = handle.attr("__dlpack_c_exchange_api__");
    if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") != 0) {
      table = static_cast<const ExchangeTable*>(
          PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    }
  }
  while (table != nullptr && table->version.major != kDlpackMajorVersion) table = table->previous;
  if (table != nullptr && table->tensor_from_object == nullptr) table = nullptr;
  handle.inc_ref();
  known.emplace(type, table);
  return table;
}

/// from_dlpack with the argument's name in its refusals.
TensorView named_view(const char* name, const DLTensor& tensor) {
  DLManagedTensor managed{};
  managed.dl_tensor = tensor;
  try {
    return from_dlpack(managed);
  } catch (const Error& error) {
    throw Error(error.code(), concat(name, ": ", error.what()));
  }
}

/// `tensor`, without its graph where it has one: PyTorch 2.9, which has no table, exports no tensor
/// that requires a gradient.
nb::object without_graph(nb::handle tensor) {
  if (!nb::hasattr(tensor, "requires_grad")) return nb::borrow(tensor);
  if (!nb::cast<bool>(tensor.attr("requires_grad"))) return nb::borrow(tensor);
  return tensor.attr("detach")();
}

/// object.__dlpack__() with what the object's version takes.
nb::object make_capsule(nb::handle given, std::uintptr_t stream) {
  const nb::object tensor = without_graph(given);
  const nb::object method = tensor.attr("__dlpack__");
  const nb::object device = tensor.attr("__dlpack_device__")();
  const bool is_cuda = nb::cast<int>(device[0]) == static_cast<int>(kDLCUDA);
  const auto call = [&](bool is_versioned) {
    nb::dict arguments;
    // NOTE: 1 is the legacy default stream, on which a stream of the context's own waits.
    if (is_cuda) arguments["stream"] = stream == 0 ? std::uintptr_t{1} : stream;
    if (is_versioned) arguments["max_version"] = nb::make_tuple(kDlpackMajorVersion, 0);
    return method(**arguments);
  };
  try {
    return call(true);
  } catch (const nb::python_error& raised) {
    if (!raised.matches(PyExc_TypeError)) throw;
  }
  return call(false);
}

std::string text_of_attribute(nb::handle tensor, const char* name, const char* before) {
  if (!nb::hasattr(tensor, name)) return {};
  const nb::object value = tensor.attr(name);
  return concat(before, nb::str(value).c_str());
}

[[noreturn]] void refuse_export(const char* name, nb::handle tensor, bool is_buffer_error,
                                const std::string& words) {
  // NOTE: what libraries say of types that DLPack, or their version of it, has not.
  if (is_buffer_error && words.find("type") != std::string::npos) {
    std::string dtype = text_of_attribute(tensor, "dtype", "");
    if (dtype.starts_with("torch.")) dtype.erase(0, std::string_view("torch.").size());
    throw Error(ErrorCode::kUnsupported, concat(name, ": no distmoe type for elements of ", dtype));
  }
  throw Error(ErrorCode::kInvalidArgument,
              concat(name, " is ", nb::type_name(tensor.type()).c_str(),
                     text_of_attribute(tensor, "layout", " of layout "),
                     ", which DLPack does not export: ", words.substr(0, words.find('\n'))));
}

/// What `exports` makes; invalid_argument with the argument's name where the library that the
/// tensor is of exports none such, by an exception of Python's or of its own in C++.
template <typename Exports>
auto exported(const char* name, nb::handle tensor, const Exports& exports) {
  try {
    return exports();
  } catch (const nb::python_error& raised) {
    const nb::handle value = raised.value();
    if (code_of(value) || !raised.matches(PyExc_Exception)) throw;
    refuse_export(name, tensor, raised.matches(PyExc_BufferError), nb::str(value).c_str());
  } catch (const Error&) {
    throw;
  } catch (const nb::builtin_exception&) {
    throw;
  } catch (const std::exception& thrown) {
    PyErr_Clear();  // PyTorch leaves the same words there
    refuse_export(name, tensor, false, thrown.what());
  }
}

}  // namespace

DType dtype_of(const std::string& name) {
  std::string legal;
  for (int value = 0; value <= static_cast<int>(DType::kF8E8M0); ++value) {
    const auto dtype = static_cast<DType>(value);
    if (name == to_string(dtype)) return dtype;
    legal += concat(value == 0 ? "" : ", ", to_string(dtype));
  }
  throw Error(ErrorCode::kInvalidArgument,
              concat("dtype is '", name, "'; legal is one of ", legal));
}

TensorView make_view(DType dtype, const std::vector<std::int64_t>& shape) {
  static_assert(kMaxTensorRank == 4);
  switch (shape.size()) {  // as TensorView takes and checks them
    case 1: return {nullptr, dtype, {shape[0]}};
    case 2: return {nullptr, dtype, {shape[0], shape[1]}};
    case 3: return {nullptr, dtype, {shape[0], shape[1], shape[2]}};
    case 4: return {nullptr, dtype, {shape[0], shape[1], shape[2], shape[3]}};
    default:
      throw Error(ErrorCode::kInvalidArgument,
                  concat("a tensor has ", shape.size(), " dimensions; 1 to ", kMaxTensorRank,
                         " are supported"));
  }
}

TensorArgument::TensorArgument(const char* name, nb::handle tensor, Access access,
                               std::uintptr_t stream, bool is_optional) {
  if (tensor.is_none() && is_optional) return;
  TensorShape* shape = nullptr;
  if (nb::try_cast(tensor, shape) && shape != nullptr) {
    view_ = shape->view;
    return;
  }
  Reinterpreted* bits = nullptr;
  if (!nb::try_cast(tensor, bits) || bits == nullptr) {
    read(name, tensor, access, stream);
    return;
  }
  read(name, bits->array, access, stream);
  if (size_of(view_.dtype) != size_of(bits->dtype)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        concat(name, " is ", view_.describe(), ", whose elements have ", size_of(view_.dtype),
               " bytes; those of ", to_string(bits->dtype), " have ", size_of(bits->dtype)));
  }
  view_.dtype = bits->dtype;
}

void TensorArgument::read(const char* name, nb::handle tensor, Access access,
                          std::uintptr_t stream) {
  const ExchangeTable* table = exchange_table_of(Py_TYPE(tensor.ptr()));
  if (table == nullptr) {
    read_capsule(name, tensor, access, stream);
    return;
  }
  DLTensor borrowed{};
  exported(name, tensor, [&] {
    if (table->tensor_from_object(tensor.ptr(), &borrowed) != 0) throw nb::python_error();
    return true;
  });
  view_ = named_view(name, borrowed);
}

void TensorArgument::read_capsule(const char* name, nb::handle tensor, Access access,
                                  std::uintptr_t stream) {
  if (!nb::hasattr(tensor, "__dlpack__")) {
    throw_wrong_type(name, tensor, "a tensor: an object with __dlpack__");
  }
  capsule_ = exported(name, tensor, [&] { return make_capsule(tensor, stream); });
  bool is_read_only = false;
  if (PyCapsule_IsValid(capsule_.ptr(), "dltensor_versioned") != 0) {
    const auto* versioned = static_cast<const VersionedTensor*>(
        PyCapsule_GetPointer(capsule_.ptr(), "dltensor_versioned"));
    if (versioned->version.major != kDlpackMajorVersion) {
      throw Error(ErrorCode::kUnsupported,
                  concat(name, " comes by DLPack ", versioned->version.major, "; 1 is supported"));
    }
    is_read_only = (versioned->flags & kReadOnlyFlag) != 0;
    view_ = named_view(name, versioned->dl_tensor);
  } else {
    const auto* managed =
        static_cast<const DLManagedTensor*>(PyCapsule_GetPointer(capsule_.ptr(), "dltensor"));
    if (managed == nullptr) throw nb::python_error();
    view_ = named_view(name, managed->dl_tensor);
  }
  if (is_read_only && access == Access::kWritten) {
    throw Error(ErrorCode::kInvalidArgument,
                concat(name, " is written to, but ", view_.describe(), " is read-only"));
  }
}

}  // namespace distmoe::python
