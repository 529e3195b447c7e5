// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "distmoe/error.hpp"

namespace distmoe {

/// The exception in flight as the library's own: itself where it is one, out_of_memory for
/// bad_alloc, internal for everything else. `where` says what was going on. Call in a handler.
Error current_error(std::string_view where);

/// What `body` returns. What it throws is thrown as current_error(): for a function whose callers
/// look for Error alone, wherever in it the system gives no memory, its messages included.
template <typename Body>
auto only_errors(std::string_view where, const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error&) {
    throw;
  } catch (...) {
    throw current_error(where);
  }
}

}  // namespace distmoe
