// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace distmoe {

/// A name from a file, fit for an error message: in quotes, control characters escaped, and cut
/// where it is too long for a line.
std::string quote(std::string_view name);

}  // namespace distmoe
