// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "distmoe/error.hpp"

namespace distmoe::tools {

/// What the command computed could not be written. Unlike the io of a file that the user named as
/// input it is a failure of the run: exit 3.
class OutputError : public Error {
 public:
  explicit OutputError(const std::string& message) : Error(ErrorCode::kIo, message) {}
};

/// Runs `step`, which writes: its io becomes OutputError.
template <typename Step>
void write_output(const Step& step) {
  try {
    step();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kIo) throw;
    throw OutputError(error.what());
  }
}

}  // namespace distmoe::tools
