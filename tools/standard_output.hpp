// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "distmoe/error.hpp"

namespace distmoe::tools {

/// What the command computed could not be written. Unlike the io of a file that the user named as
/// input it is a failure of the run: exit 3.
class OutputError : public Error {
 public:
  explicit OutputError(const std::string& message) : Error(ErrorCode::kIo, message) {}
};

/// Writes all of `text` to stdout and flushes it. Throws OutputError.
void write_stdout(std::string_view text);

}  // namespace distmoe::tools
