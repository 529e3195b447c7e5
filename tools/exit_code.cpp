// SPDX-License-Identifier: Apache-2.0
#include "exit_code.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <new>
#include <sstream>

#include "output_error.hpp"

namespace distmoe::tools {
namespace {

// 0 where stderr is not a terminal: a log stays searchable when a sentence is not cut into lines.
int stderr_columns() {
  if (isatty(STDERR_FILENO) == 0) return 0;
  winsize size{};
  const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= 40;
  return known ? std::min<int>(size.ws_col, 100) : 80;
}

std::string without_control_characters(std::string text) {
  for (char& letter : text) {
    const auto code = static_cast<unsigned char>(letter);
    if (letter == '\n' || letter == '\t') {
      letter = ' ';
    } else if (code < 0x20 || code == 0x7f) {
      letter = '?';
    }
  }
  return text;
}

}  // namespace

ExitCode exit_code_of(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kIo: return ExitCode::kWrongArguments;
    case ErrorCode::kUnsupported:
    case ErrorCode::kCapacityExceeded:
    case ErrorCode::kOutOfMemory:
    case ErrorCode::kPeerMismatch:
    case ErrorCode::kPeerLost:
    case ErrorCode::kClosed:
    case ErrorCode::kDeviceFault:
    case ErrorCode::kInternal: return ExitCode::kRuntimeFailure;
  }
  return ExitCode::kRuntimeFailure;
}

Failure failure_of_current_exception() {
  try {
    throw;
  } catch (const OutputError& error) {
    return {ExitCode::kRuntimeFailure, error.code(), std::string("io: ") + error.what()};
  } catch (const Error& error) {
    return {exit_code_of(error.code()), error.code(),
            std::string(to_string(error.code())) + ": " + error.what()};
  } catch (const std::bad_alloc&) {
    return {ExitCode::kRuntimeFailure, ErrorCode::kOutOfMemory,
            "out_of_memory: this process cannot get the memory that the run needs"};
  } catch (const std::exception& error) {
    return {ExitCode::kRuntimeFailure, ErrorCode::kInternal,
            std::string("internal: ") + error.what()};
  }
}

std::string error_paragraph(const std::string& message, int columns) {
  std::string paragraph = "distmoe: " + without_control_characters(message);
  if (columns > 0) {
    std::istringstream words(paragraph);
    std::string wrapped;
    std::size_t column = 0;
    for (std::string word; words >> word; column += word.size()) {
      if (column > 0 && column + 1 + word.size() > static_cast<std::size_t>(columns)) {
        wrapped += '\n';
        column = 0;
      } else if (column > 0) {
        wrapped += ' ';
        ++column;
      }
      wrapped += word;
    }
    paragraph = wrapped;
  }
  return paragraph + '\n';
}

void print_error(const std::string& message) {
  const std::string paragraph = error_paragraph(message, stderr_columns());
  std::fwrite(paragraph.data(), 1, paragraph.size(), stderr);
  std::fflush(stderr);
}

}  // namespace distmoe::tools
