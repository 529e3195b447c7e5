// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string_view>

#include "distmoe/export.hpp"

namespace distmoe {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

/// Receives every line that the library has to say (no newline at its end). Called from any thread,
/// one call at a time.
using LogSink = std::function<void(LogLevel, std::string_view)>;

/// Replaces the sink. The default sink writes lines at or above DISTMOE_LOG_LEVEL (warning) to
/// stderr; an empty function silences the library. The library itself never prints elsewhere.
DISTMOE_EXPORT void set_log_sink(LogSink sink);

}  // namespace distmoe
