// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "distmoe/error.hpp"

namespace distmoe {

/// The exception in flight as the library's own: itself where it is one, out_of_memory for
/// bad_alloc, internal for everything else. `where` says what was going on. Call in a handler.
Error current_error(std::string_view where);

}  // namespace distmoe
