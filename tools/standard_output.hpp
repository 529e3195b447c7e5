// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace distmoe::tools {

/// Writes all of `text` to stdout and flushes it. Throws OutputError.
void write_stdout(std::string_view text);

}  // namespace distmoe::tools
