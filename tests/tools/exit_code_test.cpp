// SPDX-License-Identifier: Apache-2.0
// Invariant: every error has the documented exit code and reaches stderr as one readable paragraph.
#include "exit_code.hpp"

#include <gtest/gtest.h>

#include <new>
#include <sstream>

#include "output_error.hpp"

namespace distmoe::tools {
namespace {

TEST(ExitCode, IsTwoForWhatTheCallerGaveAndThreeForWhatHappened) {
  EXPECT_EQ(exit_code_of(ErrorCode::kInvalidArgument), ExitCode::kWrongArguments);
  EXPECT_EQ(exit_code_of(ErrorCode::kIo), ExitCode::kWrongArguments);
  for (const ErrorCode code :
       {ErrorCode::kUnsupported, ErrorCode::kCapacityExceeded, ErrorCode::kOutOfMemory,
        ErrorCode::kPeerMismatch, ErrorCode::kPeerLost, ErrorCode::kClosed, ErrorCode::kDeviceFault,
        ErrorCode::kInternal}) {
    EXPECT_EQ(exit_code_of(code), ExitCode::kRuntimeFailure) << to_string(code);
  }
}

TEST(Failure, OfAnOutputIsOneOfTheRunAndNoWrongArgument) {
  const auto full_disk = [] { throw Error(ErrorCode::kIo, "cannot write y: the disk is full"); };
  EXPECT_EQ(attempt(full_disk).exit_code, ExitCode::kWrongArguments);
  const Failure failure = attempt([&] { write_output(full_disk); });
  EXPECT_EQ(failure.exit_code, ExitCode::kRuntimeFailure);
  EXPECT_EQ(failure.message, "io: cannot write y: the disk is full");
  const auto lost = [] { throw Error(ErrorCode::kPeerLost, "rank 1 left"); };
  EXPECT_EQ(attempt([&] { write_output(lost); }).error, ErrorCode::kPeerLost);
  EXPECT_FALSE(attempt([] { write_output([] {}); }).happened());
}

TEST(Failure, DescribesErrorsOfTheLibraryAndOfTheStandardLibrary) {
  try {
    throw Error(ErrorCode::kCapacityExceeded, "rank 1 needs 9 rows, available 8");
  } catch (...) {
    const Failure failure = failure_of_current_exception();
    EXPECT_EQ(failure.exit_code, ExitCode::kRuntimeFailure);
    EXPECT_EQ(failure.message, "capacity_exceeded: rank 1 needs 9 rows, available 8");
  }
  try {
    throw std::bad_alloc();
  } catch (...) {
    const Failure failure = failure_of_current_exception();
    EXPECT_EQ(failure.error, ErrorCode::kOutOfMemory);
    EXPECT_EQ(failure.message.find("bad_alloc"), std::string::npos);
  }
}

TEST(ErrorParagraph, KeepsOneLineWithoutATerminal) {
  const std::string message(500, 'x');
  EXPECT_EQ(error_paragraph(message, 0), "distmoe: " + message + "\n");
}

TEST(ErrorParagraph, WrapsBetweenWordsAndLosesNone) {
  std::string message;
  for (int word = 0; word < 60; ++word) message += "word" + std::to_string(word) + " ";
  const std::string paragraph = error_paragraph(message, 40);
  std::istringstream lines(paragraph);
  std::string joined;
  for (std::string line; std::getline(lines, line);) {
    EXPECT_LE(line.size(), 40u);
    joined += line + " ";
  }
  EXPECT_EQ(joined, "distmoe: " + message);
}

TEST(ErrorParagraph, ReplacesControlCharactersOfHostileNames) {
  EXPECT_EQ(error_paragraph("tensor 'a\x1b[2J\nb\x7f'", 0), "distmoe: tensor 'a?[2J b?'\n");
}

}  // namespace
}  // namespace distmoe::tools
