// SPDX-License-Identifier: Apache-2.0
//
// Exceptions of both languages: distmoe::Error becomes the class of distmoe.errors that has its
// code, with the same words, and back where Python code is called by the library.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <sstream>
#include <string>

#include "distmoe/error.hpp"

namespace distmoe::python {

/// Joins values into one text, as operator<< prints them.
template <typename... Values>
std::string concat(const Values&... values) {
  std::ostringstream text;
  (text << ... << values);
  return text.str();
}

void translate_errors();

/// Raises TypeError.
[[noreturn]] void throw_type_error(const std::string& message);

/// Runs Python code for the library, holding the GIL: its exceptions become Errors, those that are
/// none of distmoe's internal ones with their type and words.
void call_python(const char* what, const std::function<void()>& body);

}  // namespace distmoe::python
