// SPDX-License-Identifier: Apache-2.0
// Invariant: a report has one JSON object a row with every documented key, a table with the same
// figures, and no success for a timed call that was wrong.
#include "bench/bench_report.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "comparison.hpp"

namespace distmoe::tools {
namespace {

BenchRow sample_row(const char* name, std::int64_t tokens, const Spread& us) {
  BenchRow row;
  row.shape.name = name;
  row.tokens = tokens;
  row.us = us;
  return row;
}

BenchReport sample_report() {
  BenchReport report;
  report.ranks = 2;
  report.engine = "threads";
  report.backend = "cuda";
  report.mode = "forward";
  report.routing = "uniform";
  report.precision = "bf16";
  report.combine = "per_route";
  report.graph = true;
  report.rounds = 21;
  report.tolerance = 8e-3;
  report.machine = "NVIDIA H200";
  report.command = "distmoe bench --shape A";
  report.missing = {"link: no peer access"};
  BenchRow first = sample_row("A", 64, {.median = 200, .p10 = 190, .p90 = 195});
  first.tflops = 600;
  first.bound_us = 180;
  first.bound_ratio = 1.125;
  first.floor_us = 150;
  first.rel_l2 = 0.003;
  first.ceilings = {.dense_tflops = 700,
                    .copy_tb_s = 4.25,
                    .read_tb_s = 4.5,
                    .write_tb_s = 4.125,
                    .link_gb_s = {}};
  first.overhead_us = 0.0625;
  first.plan.allocated_bytes = 4096;
  first.peers = {{"torch loop", {.median = 500, .p10 = 400, .p90 = 600}, 2.5}};
  first.steps = {{"publish", 11.0}, {"route", 22.0}};
  BenchRow second = sample_row("B", 65, {.median = 100, .p10 = 95, .p90 = 106});
  second.rel_l2 = 0.004;
  second.ceilings = first.ceilings;
  second.ceilings.dense_tflops = 690;
  report.rows = {first, second};
  return report;
}

std::string lines_of(const BenchReport& report) {
  std::string text;
  for (const BenchRow& row : report.rows) text += json_of(report, row);
  return text;
}

TEST(BenchReport, ATrainingStepHasItsParts) {
  BenchReport report = sample_report();
  report.mode = "train";
  report.activation_policy = "lean";
  report.recompute = true;
  report.rows[0].forward_us = 60;
  report.rows[0].backward_us = 135;
  report.rows[0].restore_us = 54;
  std::istringstream lines(lines_of(report));
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  const auto row = nlohmann::ordered_json::parse(line);
  EXPECT_EQ(row["activation_policy"], "lean");
  EXPECT_EQ(row["recompute"], true);
  EXPECT_EQ(row["forward_us"], 60);
  EXPECT_EQ(row["backward_us"], 135);
  EXPECT_EQ(row["restore_us"], 54);
  const std::string text = text_of(report);
  EXPECT_NE(
      text.find(
          "forward 60.0, backward 135.0 us (2.25 x), of which computing again 54.0 us (0.90 x)"),
      std::string::npos)
      << text;
  EXPECT_NE(text.find("per_route, lean, recompute)"), std::string::npos) << text;
}

TEST(BenchReport, JsonHasEveryDocumentedKeyInItsOrder) {
  std::istringstream lines(lines_of(sample_report()));
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  const auto row = nlohmann::ordered_json::parse(line);
  std::vector<std::string> keys;
  for (const auto& [key, value] : row.items()) keys.push_back(key);
  const std::vector<std::string> expected = {"shape",
                                             "hidden_dim",
                                             "intermediate_dim",
                                             "top_k",
                                             "experts",
                                             "tokens",
                                             "ranks",
                                             "engine",
                                             "backend",
                                             "precision",
                                             "mode",
                                             "graph",
                                             "routing",
                                             "combine",
                                             "activation_policy",
                                             "recompute",
                                             "rounds",
                                             "median_us",
                                             "p10_us",
                                             "p90_us",
                                             "spread",
                                             "unstable",
                                             "tflops",
                                             "floor_us",
                                             "efficiency",
                                             "bound_us",
                                             "bound_ratio",
                                             "forward_us",
                                             "backward_us",
                                             "restore_us",
                                             "steps",
                                             "peers",
                                             "flops",
                                             "weight_bytes",
                                             "gradient_bytes",
                                             "link_bytes",
                                             "plan_bytes",
                                             "dense_tflops",
                                             "copy_tb_s",
                                             "read_tb_s",
                                             "write_tb_s",
                                             "link_gb_s",
                                             "overhead_us",
                                             "rel_l2",
                                             "tolerance",
                                             "repeat_bitwise_equal",
                                             "machine",
                                             "torch",
                                             "version",
                                             "date",
                                             "command",
                                             "missing"};
  EXPECT_EQ(keys, expected);
  EXPECT_EQ(row["shape"], "A");
  EXPECT_EQ(row["tokens"], 64);
  EXPECT_EQ(row["ranks"], 2);
  EXPECT_EQ(row["graph"], true);
  EXPECT_EQ(row["median_us"], 200);
  EXPECT_EQ(row["tflops"], 600);
  EXPECT_EQ(row["efficiency"], 0.75);
  EXPECT_EQ(row["spread"], 0.025);
  EXPECT_EQ(row["bound_ratio"], 1.125);
  EXPECT_EQ(row["overhead_us"], 0.0625);
  EXPECT_EQ(row["tolerance"], 8e-3);
  EXPECT_EQ(row["plan_bytes"]["allocated"], 4096);
  EXPECT_EQ(row["peers"][0]["name"], "torch loop");
  EXPECT_EQ(row["peers"][0]["ratio"], 2.5);
  EXPECT_EQ(row["peers"][0]["unstable"], true);
  EXPECT_EQ(row["steps"][1]["us"], 22.0);
  EXPECT_EQ(row["command"], "distmoe bench --shape A");
  EXPECT_EQ(row["missing"], nlohmann::ordered_json::array({"link: no peer access"}));
  EXPECT_EQ(row["unstable"], false);
  EXPECT_EQ(row["dense_tflops"], 700);
  EXPECT_TRUE(row["link_gb_s"].is_null());
  ASSERT_TRUE(std::getline(lines, line));
  const auto other = nlohmann::json::parse(line);
  EXPECT_EQ(other["unstable"], true);
  EXPECT_EQ(other["dense_tflops"], 690);
  for (const char* key : {"tflops", "floor_us", "efficiency", "bound_us"}) {
    EXPECT_TRUE(other[key].is_null()) << key;
  }
  EXPECT_FALSE(std::getline(lines, line));
}

TEST(BenchReport, TheTableHasTheFiguresAndMarksUnstableRows) {
  const std::string text = text_of(sample_report());
  for (const char* part :
       {"2 rank(s) (threads, cuda, bf16, per_route)", "CUDA graph", "21 rounds", "NVIDIA H200",
        "dense 690.00 to 700.00 TFLOP/s", "copy 4.250 TB/s", "write 4.125 TB/s", "link - GB/s",
        "not measured: link: no peer access", "200.0", "0.750", "600.00", "2.5 %", "1.125",
        "torch loop", "2.50 x as long  unstable", "route",
        "a measurement of nothing takes 0.06 us"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << '\n' << text;
  }
  std::istringstream lines(text.substr(text.find("\nA ") + 1));
  std::string line;
  std::getline(lines, line);
  EXPECT_EQ(line.find("unstable"), std::string::npos) << line;
  while (line.find("B ") != 0 && std::getline(lines, line)) continue;
  EXPECT_NE(line.find("unstable"), std::string::npos) << line;
}

TEST(BenchJudge, AcceptsARunWhoseRowsAreAllRight) {
  EXPECT_FALSE(judge(sample_report()).happened());
  EXPECT_FALSE(judge(BenchReport{}).happened());
}

TEST(BenchJudge, ARowOutsideTheToleranceIsARuntimeFailureThatNamesIt) {
  for (const double distance : {0.0081, kInfinitelyFar, std::numeric_limits<double>::quiet_NaN()}) {
    BenchReport report = sample_report();
    report.rows[1].rel_l2 = distance;
    const Failure failure = judge(report);
    EXPECT_EQ(failure.exit_code, ExitCode::kRuntimeFailure) << distance;
    EXPECT_EQ(static_cast<int>(failure.exit_code), 3);
    EXPECT_NE(failure.message.find("shape B, 65 tokens"), std::string::npos) << failure.message;
    EXPECT_NE(failure.message.find("tolerance"), std::string::npos) << failure.message;
    EXPECT_NE(text_of(report).find("WRONG: outside the tolerance"), std::string::npos) << distance;
  }
}

TEST(BenchJudge, RepeatsWithOtherBitsAreARuntimeFailure) {
  BenchReport report = sample_report();
  report.rows[0].is_bitwise_repeatable = false;
  const Failure failure = judge(report);
  EXPECT_EQ(failure.exit_code, ExitCode::kRuntimeFailure);
  EXPECT_NE(failure.message.find("shape A, 64 tokens"), std::string::npos) << failure.message;
  EXPECT_NE(text_of(report).find("WRONG: repeats differ"), std::string::npos);
}

}  // namespace
}  // namespace distmoe::tools
