// SPDX-License-Identifier: Apache-2.0
//
// Exceptions of both languages: distmoe::Error becomes the class of distmoe.errors that has its
// code, with the same words, and back where Python code is called by the library.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <optional>
#include <string>

#include "core/check.hpp"
#include "distmoe/error.hpp"

namespace distmoe::python {

void translate_errors();

/// Raises TypeError.
[[noreturn]] void throw_type_error(const std::string& message);

/// Raises TypeError with the argument, the type that it has and what it must be.
[[noreturn]] void throw_wrong_type(const char* name, nanobind::handle given, const char* legal);

/// The code of an exception of distmoe's, or none.
std::optional<ErrorCode> code_of(nanobind::handle exception);

/// The Error that a Python exception stands for, where a program raised it in place of a call:
/// those of distmoe keep their code, TypeError and ValueError are invalid_argument, others
/// internal.
Error error_of_exception(nanobind::handle exception);

/// Runs Python code for the library, holding the GIL: its exceptions become Errors, those that are
/// none of distmoe's internal ones with their type and words.
void call_python(const char* what, const std::function<void()>& body);

}  // namespace distmoe::python
