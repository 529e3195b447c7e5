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

std::string type_and_words(nb::handle exception) {
  return concat(nb::type_name(exception.type()).c_str(), ": ", nb::str(exception).c_str());
}

/// The Error that a Python exception stands for that `what`, which the library called, raised.
Error error_of(const nb::python_error& raised, const char* what) {
  const nb::handle value = raised.value();
  if (const auto code = code_of(value)) return {*code, nb::str(value).c_str()};
  return {ErrorCode::kInternal, concat(what, " raised ", type_and_words(value))};
}

}  // namespace

std::optional<ErrorCode> code_of(nb::handle exception) {
  for (int code = 0; code <= static_cast<int>(ErrorCode::kInternal); ++code) {
    const auto known = static_cast<ErrorCode>(code);
    if (nb::isinstance(exception, error_classes()[to_string(known)])) return known;
  }
  return std::nullopt;
}

void translate_errors() {
  nb::register_exception_translator([](const std::exception_ptr& exception, void*) {
    try {
      std::rethrow_exception(exception);
    } catch (const Error& error) {
      raise_in_python(error);
    }
  });
}

Error error_of_exception(nb::handle exception) {
  if (const auto code = code_of(exception)) return {*code, nb::str(exception).c_str()};
  const bool is_argument = nb::isinstance(exception, nb::handle(PyExc_TypeError)) ||
                           nb::isinstance(exception, nb::handle(PyExc_ValueError));
  return {is_argument ? ErrorCode::kInvalidArgument : ErrorCode::kInternal,
          type_and_words(exception)};
}

void throw_type_error(const std::string& message) { throw nb::type_error(message.c_str()); }

void throw_wrong_type(const char* name, nb::handle given, const char* legal) {
  throw_type_error(
      concat(name, " is ", nb::type_name(given.type()).c_str(), "; it must be ", legal));
}

void call_python(const char* what, const std::function<void()>& body) {
  const nb::gil_scoped_acquire gil;
  try {
    body();
  } catch (const nb::python_error& raised) {
    throw Error(error_of(raised, what));
  }
}

}  // namespace distmoe::python
