// SPDX-License-Identifier: Apache-2.0
//
// The checks of the library: one exception type, messages with values, the throw out of line.
#pragma once

#include <sstream>
#include <string>

#include "distmoe/error.hpp"

namespace distmoe {

/// Joins values into one string as operator<< prints them.
template <typename... Values>
std::string concat(const Values&... values) {
  std::ostringstream text;
  (text << ... << values);
  return text.str();
}

[[noreturn]] void throw_error(ErrorCode code, const std::string& message);

}  // namespace distmoe

/// Throws Error(ErrorCode::code) with the joined values unless `condition` holds. The values are
/// evaluated on failure only; they say what was given and what is legal.
#define DISTMOE_CHECK(condition, code, ...)                                               \
  do {                                                                                    \
    if (!(condition)) [[unlikely]]                                                        \
      ::distmoe::throw_error(::distmoe::ErrorCode::code, ::distmoe::concat(__VA_ARGS__)); \
  } while (false)
