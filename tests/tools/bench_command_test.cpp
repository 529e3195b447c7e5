// SPDX-License-Identifier: Apache-2.0
// Invariant: `distmoe bench` on the CPU times every shape with every number of tokens, checks what
// it timed, prints one JSON object a row or a table, and exits with 2 or 3 and a reason otherwise.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "command_testing.hpp"

namespace distmoe::tools {
namespace {

class BenchCommand : public CommandTest {
 protected:
  CommandResult bench(const Words& more) {
    Words words = {"env", "CUDA_VISIBLE_DEVICES=", command_path(), "bench", "--rounds", "2"};
    words.insert(words.end(), more.begin(), more.end());
    return run_words(words);
  }
  void expect_refused(int exit_code, const Words& words, const std::string& part) {
    const CommandResult result = bench(words);
    EXPECT_EQ(result.exit_code, exit_code) << result.error;
    EXPECT_NE(result.error.find(part), std::string::npos) << result.error;
    EXPECT_EQ(result.output, "");
  }
  /// A shell script that stands for a program.
  void write_program(const std::string& name, const std::string& script) const {
    std::ofstream(file(name)) << "#!/bin/sh\n" << script;
    std::filesystem::permissions(file(name), std::filesystem::perms::owner_all);
  }
};

std::vector<nlohmann::json> rows_of(const CommandResult& result) {
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.error, "");
  std::vector<nlohmann::json> rows;
  std::istringstream lines(result.output);
  for (std::string line; std::getline(lines, line);) {
    rows.push_back(nlohmann::json::parse(line, nullptr, false));
    EXPECT_FALSE(rows.back().is_discarded()) << line;
  }
  return rows;
}

TEST_F(BenchCommand, PrintsARowForEveryShapeAndNumberOfTokens) {
  const auto rows = rows_of(bench(
      {"--shape", "64,32,8,2", "48,40,6,3", "--tokens", "1", "33", "--ranks", "3", "--json"}));
  ASSERT_EQ(rows.size(), 4u);
  std::set<std::pair<std::string, int>> seen;
  for (const auto& row : rows) {
    seen.emplace(row["shape"], row["tokens"]);
    EXPECT_EQ(row["ranks"], 3);
    EXPECT_EQ(row["engine"], "threads");
    EXPECT_EQ(row["backend"], "cpu");
    EXPECT_EQ(row["precision"], "bf16");
    EXPECT_EQ(row["combine"], "per_route");
    EXPECT_EQ(row["mode"], "forward");
    EXPECT_EQ(row["rounds"], 2);
    for (const char* key :
         {"median_us", "p10_us", "p90_us", "tflops", "floor_us", "efficiency", "bound_us",
          "bound_ratio", "dense_tflops", "copy_tb_s", "read_tb_s", "write_tb_s", "rel_l2"}) {
      ASSERT_TRUE(row[key].is_number()) << key << ": " << row;
      EXPECT_GT(row[key], 0.0) << key;
    }
    EXPECT_LE(row["p10_us"], row["median_us"]);
    EXPECT_LE(row["median_us"], row["p90_us"]);
    EXPECT_TRUE(row["link_gb_s"].is_null());
    EXPECT_EQ(row["repeat_bitwise_equal"], true);
    EXPECT_EQ(row["date"], rows[0]["date"]);
    EXPECT_GT(row["plan_bytes"]["allocated"], 0);
    // What the harness adds is less than a hundredth of a row of 1 ms.
    EXPECT_GT(row["overhead_us"], 0.0);
    EXPECT_LT(row["overhead_us"], 10.0);
    EXPECT_EQ(row["command"],
              "distmoe bench --shape 64,32,8,2 48,40,6,3 --tokens 1 33 --ranks 3 --rounds 2");
  }
  const std::set<std::pair<std::string, int>> expected = {
      {"64,32,8,2", 1}, {"64,32,8,2", 33}, {"48,40,6,3", 1}, {"48,40,6,3", 33}};
  EXPECT_EQ(seen, expected);
}

TEST_F(BenchCommand, TimesStepsAlone) {
  for (const std::string mode : {"dispatch", "gemm", "combine"}) {
    const auto rows = rows_of(bench({"--shape", "64,32,8,2", "--tokens", "40", "--ranks", "2",
                                     "--combine", "per_rank", "--mode", mode, "--json"}));
    ASSERT_EQ(rows.size(), 1u);
    EXPECT_EQ(rows[0]["mode"], mode);
    EXPECT_EQ(rows[0]["combine"], "per_rank");
    EXPECT_GT(rows[0]["median_us"], 0.0);
    EXPECT_EQ(rows[0]["tflops"].is_null(), mode != "gemm");
    EXPECT_EQ(rows[0]["floor_us"].is_null(), mode == "dispatch");
  }
}

TEST_F(BenchCommand, TimesForwardAndBackward) {
  for (const Words& more :
       {Words{}, Words{"--recompute"}, Words{"--activation-policy", "lean"},
        Words{"--activation-policy", "lean", "--combine", "per_rank", "--recompute"}}) {
    Words words{"--shape", "64,32,8,2", "--tokens", "9",     "40",
                "--ranks", "3",         "--mode",   "train", "--json"};
    words.insert(words.end(), more.begin(), more.end());
    const auto rows = rows_of(bench(words));
    ASSERT_EQ(rows.size(), 2u);
    for (const auto& row : rows) {
      EXPECT_EQ(row["mode"], "train");
      EXPECT_EQ(row["recompute"], std::ranges::find(more, "--recompute") != more.end());
      for (const char* key : {"median_us", "tflops", "floor_us", "bound_us", "forward_us",
                              "backward_us", "restore_us", "rel_l2"}) {
        ASSERT_TRUE(row[key].is_number()) << key << ": " << row;
        EXPECT_GT(row[key], 0.0) << key;
      }
      EXPECT_LT(row["forward_us"], row["median_us"]);
      EXPECT_LT(row["rel_l2"], 8e-3);
      EXPECT_EQ(row["repeat_bitwise_equal"], true);
    }
  }
}

/// Further from the reference than BF16 rounds, and within what the precision may be.
TEST_F(BenchCommand, TimesLowPrecisionsWithPreparedWeights) {
  for (const Words& more : {Words{"--precision", "mxfp8"}, Words{"--precision", "nvfp4"},
                            Words{"--precision", "mxfp4", "--pipeline", "mega"},
                            Words{"--precision", "mxfp8", "--mode", "train"}}) {
    Words words{"--shape", "64,32,8,2", "--tokens", "40", "--ranks", "3", "--json"};
    words.insert(words.end(), more.begin(), more.end());
    const auto rows = rows_of(bench(words));
    ASSERT_EQ(rows.size(), 1u);
    EXPECT_EQ(rows[0]["precision"], more[1]);
    EXPECT_GT(rows[0]["rel_l2"], 8e-3) << rows[0];
    EXPECT_EQ(rows[0]["repeat_bitwise_equal"], true);
    EXPECT_GT(rows[0]["bound_us"], 0.0);
  }
}

TEST_F(BenchCommand, TimesEveryStepOfWholeCalls) {
  const auto forward = rows_of(
      bench({"--shape", "64,32,8,2", "--tokens", "40", "--ranks", "2", "--steps", "--json"}));
  ASSERT_EQ(forward.size(), 1u);
  std::vector<std::string> names;
  for (const auto& step : forward[0]["steps"]) {
    names.push_back(step["name"]);
    EXPECT_GE(step["us"], 0.0) << step;
  }
  const std::vector<std::string> steps = {"publish",    "route",  "carve", "dispatch_w13_swiglu",
                                          "w2_scatter", "combine"};
  EXPECT_EQ(names, steps);
  const auto train = rows_of(
      bench({"--shape", "64,32,8,2", "--tokens", "40", "--mode", "train", "--steps", "--json"}));
  ASSERT_EQ(train[0]["steps"].size(), 16u) << train[0]["steps"];
  EXPECT_EQ(train[0]["steps"][15]["name"], "reduce_gradients");
}

TEST_F(BenchCommand, APeerThatIsNotInstalledIsLeftOutByName) {
  const auto rows = rows_of(bench({"--shape", "64,32,8,2", "--tokens", "4", "--peers", "--python",
                                   "/no/such/python", "--json"}));
  EXPECT_EQ(rows[0]["peers"].size(), 0u);
  EXPECT_TRUE(rows[0]["torch"].is_null());
  EXPECT_NE(rows[0]["missing"].dump().find("PyTorch: io: cannot start /no/such/python"),
            std::string::npos)
      << rows[0]["missing"];
  // A Python without PyTorch: what it says last.
  write_program("python", "echo 'no module named torch' >&2\nexit 1\n");
  const CommandResult table =
      bench({"--shape", "64,32,8,2", "--tokens", "4", "--peers", "--python", file("python")});
  EXPECT_NE(table.output.find("not measured: PyTorch: io: "), std::string::npos) << table.output;
  EXPECT_NE(table.output.find("no module named torch"), std::string::npos) << table.output;
}

TEST_F(BenchCommand, APeerIsTimedInTheSameRounds) {
  // It answers as bench/torch_peers.py does.
  write_program("python",
                "echo noise\n"
                "echo '{\"ok\": true, \"version\": \"0\", \"variants\": [\"loop\"]}'\n"
                "while read -r line; do case $line in\n"
                "*time*) echo '{\"us\": 1e6}';; *) echo '{\"ok\": true}';; esac; done\n");
  const Words words{"--shape", "64,32,8,2", "--tokens",     "4",
                    "--peers", "--python",  file("python"), "--json"};
  const auto rows = rows_of(bench(words));
  ASSERT_EQ(rows[0]["peers"].size(), 1u) << rows[0];
  EXPECT_EQ(rows[0]["torch"], "PyTorch 0");
  const auto& peer = rows[0]["peers"][0];
  EXPECT_EQ(peer["name"], "torch loop");
  EXPECT_EQ(peer["median_us"], 1e6);
  EXPECT_GT(peer["ratio"], 1.0);
}

TEST_F(BenchCommand, APeerThatDoesNotAnswerIsLeftOutAfterTheTimeout) {
  // It makes its layer and answers its first call, then no more.
  write_program(
      "python",
      "echo '{\"ok\": true, \"version\": \"0\", \"variants\": [\"loop\"]}'\n"
      "read -r line; echo '{\"ok\": true}'; read -r line; echo '{\"us\": 1}'; exec sleep 600\n");
  // Nor does this one even begin.
  write_program("stuck", "exec sleep 600\n");
  for (const char* name : {"python", "stuck"}) {
    const auto rows = rows_of(bench({"--shape", "64,32,8,2", "--tokens", "4", "5", "--peers",
                                     "--python", file(name), "--timeout", "0.5", "--json"}));
    ASSERT_EQ(rows.size(), 2u);
    EXPECT_EQ(rows[0]["peers"].size(), 0u);
    EXPECT_EQ(rows[1]["peers"].size(), 0u);
    EXPECT_NE(rows[0]["missing"].dump().find("does not answer"), std::string::npos)
        << rows[0]["missing"];
    EXPECT_NE(rows[0]["missing"].dump().find("(--timeout is 0.5 s)"), std::string::npos)
        << rows[0]["missing"];
  }
}

/// What ends a run keeps the rows before: they are out while later ones are still measured.
TEST_F(BenchCommand, EveryRowIsPrintedAsSoonAsItIsMeasured) {
  // A peer that keeps the second row waiting, once its layer is there.
  write_program(
      "python",
      "echo '{\"ok\": true, \"version\": \"0\", \"variants\": [\"loop\"]}'\nn=0\n"
      "while read -r line; do case $line in\n"
      "*'\"time\",\"row\":1'*) n=$((n+1)); if [ $n -gt 1 ]; then exec sleep 600; fi;; esac\n"
      "echo '{\"us\": 1}'; done\n");
  const Process process(
      {"env", "CUDA_VISIBLE_DEVICES=", command_path(), "bench", "--json", "--rounds", "2",
       "--shape", "64,32,8,2", "--tokens", "4", "5", "--peers", "--python", file("python")},
      folder_);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  std::string text;
  while (text.find('\n') == std::string::npos && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    text = read_file(file("stdout"));
  }
  ASSERT_NE(text, "");
  EXPECT_EQ(nlohmann::json::parse(text, nullptr, false)["tokens"], 4);
}

TEST_F(BenchCommand, APeerThatCannotDoTheRoutesIsLeftOutByName) {
  SampleInput(3, 2, 64, {3, -1, 3, 1, 0, 2}).write(file("routed"));
  write_program("python",
                "echo '{\"version\": \"0\", \"variants\": []}'\n"
                "while read -r line; do echo '{\"ok\": true}'; done\n");
  const auto rows =
      rows_of(bench({"--shape", "64,32,4,2", "--tokens", "4", "--routing", file("routed"),
                     "--peers", "--python", file("python"), "--json"}));
  EXPECT_NE(
      rows[0]["missing"].dump().find("PyTorch: unsupported: its layers here know no disabled"),
      std::string::npos)
      << rows[0]["missing"];
}

TEST_F(BenchCommand, RoutesAsAFileDoes) {
  // All tokens of both ranks name expert 3, and one route is disabled.
  SampleInput(5, 2, 64, {3, -1, 3, 1, 3, 2, 3, 0, 3, 1}).write(file("routed"));
  const auto rows = rows_of(bench({"--shape", "64,32,4,2", "--tokens", "7", "--ranks", "2",
                                   "--routing", file("routed"), "--json"}));
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0]["routing"], file("routed").string());
  expect_refused(2, {"--shape", "64,32,4,3", "--tokens", "7", "--routing", file("routed")},
                 "2 experts a token");
  expect_refused(2, {"--shape", "64,32,3,2", "--tokens", "7", "--routing", file("routed")},
                 "names expert 3");
  expect_refused(2, {"--shape", "64,32,4,2", "--tokens", "7", "--routing", file("none")}, "none");
}

TEST_F(BenchCommand, PrintsATable) {
  const CommandResult result =
      bench({"--shape", "64,32,8,2", "--tokens", "9", "--routing", "zipf"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  for (const char* part : {"forward, 1 rank(s) (threads, cpu, bf16, per_route), routing zipf",
                           "ceilings: dense", "median us", "efficiency", "64,32,8,2"}) {
    EXPECT_NE(result.output.find(part), std::string::npos) << part << '\n' << result.output;
  }
}

TEST_F(BenchCommand, ATimedCallOutsideTheToleranceExitsWith3AfterItsReport) {
  const CommandResult result =
      bench({"--shape", "64,32,8,2", "--tokens", "9", "--tolerance", "1e-9", "--json"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.error.find("shape 64,32,8,2, 9 tokens: the timed call is outside the tolerance"),
            std::string::npos)
      << result.error;
  EXPECT_GT(result.json()["rel_l2"], 1e-9);
}

TEST_F(BenchCommand, WrongArgumentsExitWith2) {
  expect_refused(2, {}, "--shape");
  expect_refused(2, {"--shape", "64,32,8,9", "--tokens", "4"}, "top_k is 9");
  expect_refused(2, {"--shape", "64,32,8,2", "--tokens", "x"}, "--tokens is 'x'");
  expect_refused(2, {"--shape", "1000000,1000000,6000000,1", "--tokens", "1"},
                 "does not fit in 64 bits: 6000000 * 2000000000000");
  expect_refused(2, {"--shape", "64,32,8,2", "--tokens", "4", "--graph"}, "--backend cuda");
  expect_refused(2, {"--shape", "64,32,8,2", "--tokens", "4", "--sms", "8"}, "--backend cuda");
  expect_refused(3, {"--shape", "64,32,8,2", "--tokens", "4", "--mode", "exchange"},
                 "CUDA backend");
  expect_refused(2, {"--shape", "64,32,8,2", "--tokens", "4", "--recompute"}, "--mode train");
}

TEST_F(BenchCommand, WhatCannotRunHereIsUnsupported) {
  expect_refused(
      3, {"--shape", "64,32,8,2", "--tokens", "4", "--mode", "train", "--combine", "per_rank"},
      "unsupported");
  expect_refused(3, {"--shape", "64,32,8,2", "--tokens", "4", "--backend", "cuda"},
                 "CUDA is not available");
}

TEST_F(BenchCommand, RunsUnderMpi) {
  if (!mpi_problem().empty()) GTEST_SKIP() << mpi_problem();
  Words words = mpirun(2);
  words.insert(words.end(), {command_path(), "bench", "--engine", "mpi", "--rounds", "2", "--shape",
                             "64,32,8,2", "--tokens", "16", "--json"});
  const auto rows = rows_of(run_words(words));
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0]["engine"], "mpi");
  EXPECT_EQ(rows[0]["ranks"], 2);
  words.insert(words.end(), {"--ranks", "3"});
  const CommandResult refused = run_words(words);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.error.find("the launcher started 2 ranks"), std::string::npos) << refused.error;
}

}  // namespace
}  // namespace distmoe::tools
