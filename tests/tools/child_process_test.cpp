// SPDX-License-Identifier: Apache-2.0
// Invariant: what a program says and how it ends is known, also where it does not end by itself.
#include "child_process.hpp"

#include <gtest/gtest.h>

#include "distmoe/error.hpp"

namespace distmoe::tools {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

ChildResult shell(const std::string& script, seconds limit,
                  const std::vector<std::string>& environment = {}) {
  return ChildProcess({"sh", "-c", script}, environment).wait(steady_clock::now() + limit);
}

TEST(ChildProcess, SaysWhatItWroteAndHowItEnded) {
  const ChildResult result = shell("echo one; echo two >&2; exit 5", seconds(60));
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_EQ(result.output, "one\ntwo\n");
  EXPECT_FALSE(result.is_late);
  EXPECT_EQ(shell("kill -9 $$", seconds(60)).exit_code, 128 + 9);
}

TEST(ChildProcess, GetsVariablesInPlaceOfThisProcesss) {
  setenv("DISTMOE_TEST_A", "outer", 1);
  setenv("DISTMOE_TEST_AB", "kept", 1);
  const ChildResult result =
      shell("echo $DISTMOE_TEST_A $DISTMOE_TEST_AB", seconds(60), {"DISTMOE_TEST_A=inner"});
  EXPECT_EQ(result.output, "inner kept\n");
}

TEST(ChildProcess, IsEndedAtTheDeadlineEvenWhereItRefuses) {
  const auto begin = steady_clock::now();
  const ChildResult result =
      shell("trap '' TERM; echo begun; while :; do sleep 1; done", seconds(2));
  EXPECT_TRUE(result.is_late);
  EXPECT_EQ(result.exit_code, 128 + 9);
  EXPECT_EQ(result.output, "begun\n");
  EXPECT_LT(steady_clock::now() - begin, seconds(60));
}

TEST(ChildProcess, AnswersLineByLine) {
  ChildProcess process({"sh", "-c", "while read -r line; do echo noise; echo \"= $line\"; done"},
                       {}, ChildInput::kPipe);
  const auto deadline = steady_clock::now() + seconds(60);
  for (const std::string word : {"one", "two"}) {
    process.write_line(word, deadline);
    EXPECT_EQ(process.read_line("= ", deadline), "= " + word);
  }
  EXPECT_EQ(process.wait(deadline).exit_code, 0);
}

TEST(ChildProcess, WritingToWhatDoesNotReadEndsAtItsDeadline) {
  ChildProcess process({"sleep", "600"}, {}, ChildInput::kPipe);
  const std::string more_than_a_pipe_holds(std::size_t{4} << 20, 'x');
  try {
    process.write_line(more_than_a_pipe_holds, steady_clock::now() + std::chrono::milliseconds(50));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_STREQ(error.what(), "sleep does not read");
  }
}

TEST(ChildProcess, AnEndInPlaceOfAnAnswerIsAnErrorWithItsLastWords) {
  ChildProcess process({"sh", "-c", "echo first; echo no module >&2; exit 1"}, {},
                       ChildInput::kPipe);
  try {
    process.read_line("{", steady_clock::now() + seconds(60));
    FAIL() << "there was no answer";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "sh ended: no module");
  }
}

TEST(ChildProcess, WhatCannotBeStartedIsAnError) {
  EXPECT_THROW(ChildProcess({"/no/such/program"}, {}), Error);
}

}  // namespace
}  // namespace distmoe::tools
