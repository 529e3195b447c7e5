// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "distmoe/log.hpp"

namespace distmoe {

/// Hands one line to the current sink. Never throws: a sink that does loses its line.
void log(LogLevel level, std::string_view line) noexcept;

}  // namespace distmoe
