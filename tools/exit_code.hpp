// SPDX-License-Identifier: Apache-2.0
//
// What the distmoe command returns to the shell; docs/command-line.md lists it.
#pragma once

#include <exception>
#include <string>

#include "distmoe/error.hpp"

namespace distmoe::tools {

enum class ExitCode : int {
  kSuccess = 0,
  kOutsideTolerance = 1,
  kWrongArguments = 2,  ///< the command line, or a file that it names, breaks the contract
  kRuntimeFailure = 3,
};

/// An error of the library in terms of the shell. Files are arguments: an unreadable one is
/// kWrongArguments.
ExitCode exit_code_of(ErrorCode code) noexcept;

/// Why a rank, or the command, cannot go on. Empty message and kSuccess: it can.
struct Failure {
  ExitCode exit_code = ExitCode::kSuccess;
  ErrorCode error = ErrorCode::kInternal;
  std::string message;

  bool happened() const noexcept { return exit_code != ExitCode::kSuccess; }
};

/// Describes the exception that is being handled. To be called in a catch block.
Failure failure_of_current_exception();

/// Runs `step`; why it failed, if it did.
template <typename Step>
Failure attempt(const Step& step) {
  try {
    step();
    return {};
  } catch (...) {
    return failure_of_current_exception();
  }
}

/// `message` as one paragraph for stderr: "distmoe: <message>", control characters replaced (a file
/// may bring them), wrapped at `columns` between words; 0 does not wrap. Ends with a newline.
std::string error_paragraph(const std::string& message, int columns);

/// Writes error_paragraph to stderr, wrapped to the terminal where stderr is one.
void print_error(const std::string& message);

}  // namespace distmoe::tools
