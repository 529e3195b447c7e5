// SPDX-License-Identifier: Apache-2.0
#include "errors.hpp"

#include <exception>

namespace nb = nanobind;

namespace distmoe::python {
namespace {

nb::object error_classes() { return nb::module_::import_("distmoe.errors").attr("CLASS_OF_CODE"); }

void raise_in_python(const Error& error) {
  const nb::object exception = error_classes()[to_string(error.code())];
  PyErr_SetString(exception.ptr(), error.what());
}

/// The Error that a Python exception stands for.
Error error_of(const nb::python_error& raised, const char* what) {
  const nb::handle value = raised.value();
  for (int code = 0; code <= static_cast<int>(ErrorCode::kInternal); ++code) {
    const auto known = static_cast<ErrorCode>(code);
    if (nb::isinstance(value, error_classes()[to_string(known)])) {
      return {known, nb::str(value).c_str()};
    }
  }
  return {ErrorCode::kInternal, concat(what, " raised ", nb::type_name(value.type()).c_str(), ": ",
                                       nb::str(value).c_str())};
}

}  // namespace

void translate_errors() {
  nb::register_exception_translator([](const std::exception_ptr& exception, void*) {
    try {
      std::rethrow_exception(exception);
    } catch (const Error& error) {
      raise_in_python(error);
    }
  });
}

void throw_type_error(const std::string& message) { throw nb::type_error(message.c_str()); }

void call_python(const char* what, const std::function<void()>& body) {
  const nb::gil_scoped_acquire gil;
  try {
    body();
  } catch (const nb::python_error& raised) {
    throw Error(error_of(raised, what));
  }
}

}  // namespace distmoe::python
