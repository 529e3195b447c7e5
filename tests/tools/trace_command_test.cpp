// SPDX-License-Identifier: Apache-2.0
// Invariant: `distmoe trace` writes every step of one call on every rank, in order and without
// overlap on a rank, on one axis; nothing is written where a call was refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "command_testing.hpp"

namespace distmoe::tools {
namespace {

const std::vector<std::string> kForward = {"publish",    "route",  "carve", "dispatch_w13_swiglu",
                                           "w2_scatter", "combine"};
const std::vector<std::string> kBackward = {
    "publish_backward",  "carve_backward",  "restore_activations", "dispatch_grad_h3",
    "w2_dgrad",          "w2_wgrad",        "swiglu_backward",     "w13_wgrad",
    "w13_dgrad_scatter", "reduce_gradients"};

class TraceCommand : public CommandTest {
 protected:
  CommandResult trace(const Words& more) {
    Words words{"env",          "CUDA_VISIBLE_DEVICES=",
                command_path(), "trace",
                "--shape",      "64,32,8,2",
                "-o",           file("trace")};
    words.insert(words.end(), more.begin(), more.end());
    return run_words(words);
  }
  nlohmann::json written() { return nlohmann::json::parse(read_file(file("trace"))); }

  /// The steps of each rank in the order of time; checks that one begins where another ended.
  static std::map<int, std::vector<std::string>> steps_of(const nlohmann::json& trace) {
    std::map<int, std::vector<std::string>> steps;
    std::map<int, double> ends;
    for (const auto& event : trace["traceEvents"]) {
      if (event["ph"] != "X") continue;
      const int rank = event["tid"];
      const double begin = event["ts"];
      EXPECT_GE(event["dur"], 0.0);
      EXPECT_GE(begin, 0.0);
      if (ends.contains(rank)) {
        EXPECT_NEAR(begin, ends[rank], 1e-6);
      }
      ends[rank] = begin + event["dur"].get<double>();
      steps[rank].push_back(event["name"]);
    }
    return steps;
  }
};

TEST_F(TraceCommand, HasTheStepsOfAForwardOnEveryRank) {
  const CommandResult result = trace({"--tokens", "40", "--ranks", "3"});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_NE(result.output.find("6 steps on 3 rank(s)"), std::string::npos) << result.output;
  const auto file = written();
  const auto steps = steps_of(file);
  ASSERT_EQ(steps.size(), 3U);
  for (const auto& [rank, names] : steps) EXPECT_EQ(names, kForward) << rank;
  EXPECT_EQ(file["otherData"]["backend"], "cpu");
  std::int64_t rows = 0;
  for (const auto& event : file["traceEvents"]) {
    if (event["ph"] == "X" && event["name"] == "combine") rows += event["args"]["rows"].get<int>();
  }
  EXPECT_EQ(rows, 3 * 40 * 2);
  // Ranks of one machine share its clock: in a collective step they overlap.
  double latest_begin = 0.0;
  double earliest_end = 1e300;
  for (const auto& event : file["traceEvents"]) {
    if (event["ph"] != "X" || event["name"] != "publish") continue;
    latest_begin = std::max(latest_begin, event["ts"].get<double>());
    earliest_end = std::min(earliest_end, event["ts"].get<double>() + event["dur"].get<double>());
  }
  EXPECT_LT(latest_begin, earliest_end);
}

TEST_F(TraceCommand, HasTheStepsOfForwardAndBackward) {
  ASSERT_EQ(trace({"--tokens", "9", "--ranks", "2", "--mode", "train", "--recompute"}).exit_code,
            0);
  std::vector<std::string> both = kForward;
  both.insert(both.end(), kBackward.begin(), kBackward.end());
  const auto steps = steps_of(written());
  ASSERT_EQ(steps.size(), 2U);
  for (const auto& [rank, names] : steps) EXPECT_EQ(names, both) << rank;
}

TEST_F(TraceCommand, UnderMpiTheFirstRankWrites) {
  if (const std::string problem = mpi_problem(); !problem.empty()) GTEST_SKIP() << problem;
  Words words = mpirun(2);
  words.insert(words.end(), {command_path(), "trace", "--engine", "mpi", "--shape", "64,32,8,2",
                             "--tokens", "5", "--output", file("trace")});
  const CommandResult result = run_words(words);
  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(steps_of(written()).size(), 2U);
}

TEST_F(TraceCommand, WrongArgumentsExitWith2AndWriteNothing) {
  for (const Words& words :
       {Words{"--tokens", "4", "5"}, Words{"--tokens", "4", "--mode", "gemm"},
        Words{"--tokens", "4", "--recompute"}, Words{"--tokens", "4", "-o", "/no/such/folder/t"}}) {
    const CommandResult result = trace(words);
    EXPECT_EQ(result.exit_code, 2) << result.error;
    EXPECT_EQ(result.output, "");
  }
  expect_no_output("trace");
}

}  // namespace
}  // namespace distmoe::tools
