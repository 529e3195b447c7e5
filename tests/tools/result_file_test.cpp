// SPDX-License-Identifier: Apache-2.0
// Invariant: lines that `distmoe bench --json` writes are read back value by value; anything else
// is refused with its file, line and key.
#include "results/result_file.hpp"

#include <gtest/gtest.h>

#include "bench/bench_report.hpp"
#include "distmoe/error.hpp"

namespace distmoe::tools {
namespace {

std::string sample_lines() {
  BenchReport report;
  report.ranks = 2;
  report.engine = "threads";
  report.backend = "cpu";
  report.mode = "train";
  report.routing = "zipf";
  report.precision = "mxfp8";
  report.combine = "per_rank";
  report.activation_policy = "lean";
  report.recompute = true;
  report.machine = "a processor";
  report.torch = "PyTorch 2";
  report.version = "0.1.0";
  report.date = "2026-11-30T18:00:00Z";
  report.command = "distmoe bench";
  report.missing = {"link: none"};
  report.tolerance = 0.12;
  BenchRow row;
  row.shape.name = "A";
  row.shape.hidden_dim = 64;
  row.shape.top_k = 2;
  row.experts = 8;
  row.tokens = 64;
  row.ceilings.dense_tflops = 0.25;
  row.overhead_us = 0.5;
  row.us = {.median = 200, .p10 = 190, .p90 = 215};
  row.tflops = 0.125;
  row.floor_us = 150;
  row.forward_us = 70;
  row.traffic.flops = 1e9;
  row.traffic.weight_bytes = 1e6;
  row.steps = {{"publish", 11.0}, {"route", 22.0}};
  row.peers = {{"torch loop", {.median = 500, .p10 = 400, .p90 = 600}, 2.5}};
  row.plan.control_bytes = 128;
  row.plan.allocated_bytes = 4096;
  row.rel_l2 = 0.003;
  return json_of(report, row) + json_of(report, row);
}

std::string refusal_of(const std::string& text) {
  try {
    parse_results(text, "file");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "accepted";
}

TEST(ResultFile, GivesBackWhatWasMeasured) {
  const std::vector<ResultRow> rows = parse_results(sample_lines() + "\n \n", "file");
  ASSERT_EQ(rows.size(), 2U);
  const ResultRow& row = rows[1];
  EXPECT_EQ(row.shape, "A");
  EXPECT_EQ(row.hidden_dim, 64);
  EXPECT_EQ(row.top_k, 2);
  EXPECT_EQ(row.experts, 8);
  EXPECT_EQ(row.call(), "train, mxfp8, lean, recompute, per_rank, zipf");
  EXPECT_EQ(row.routing, "zipf");
  EXPECT_EQ(row.ranks, 2);
  EXPECT_EQ(row.tokens, 64);
  EXPECT_EQ(row.median_us, 200);
  EXPECT_EQ(row.spread, 0.125);
  EXPECT_TRUE(row.is_unstable);
  EXPECT_EQ(row.tflops, 0.125);
  EXPECT_EQ(row.efficiency, 0.75);
  EXPECT_EQ(row.forward_us, 70);
  EXPECT_FALSE(row.bound_us || row.backward_us || row.copy_tb_s);
  EXPECT_EQ(row.flops, 1e9);
  EXPECT_EQ(row.overhead_us, 0.5);
  ASSERT_EQ(row.steps.size(), 2U);
  EXPECT_EQ(row.steps[1].name, "route");
  EXPECT_EQ(row.steps[1].value, 22.0);
  ASSERT_EQ(row.peers.size(), 1U);
  EXPECT_EQ(row.peers[0].name, "torch loop");
  EXPECT_EQ(row.peers[0].ratio, 2.5);
  EXPECT_TRUE(row.peers[0].is_unstable);
  // All kinds of memory but their sum.
  EXPECT_EQ(row.plan_bytes.size(), 7U);
  EXPECT_EQ(row.missing, std::vector<std::string>{"link: none"});
}

TEST(ResultFile, RefusesWhatIsNoResult) {
  EXPECT_NE(refusal_of("hello\n").find("file line 1 is not one JSON object"), std::string::npos);
  EXPECT_NE(refusal_of(sample_lines() + "[1]\n").find("file line 3"), std::string::npos);
  EXPECT_NE(refusal_of("{}").find("file line 1: there is no \"shape\""), std::string::npos);
  std::string text = sample_lines();
  text.replace(text.find("\"tokens\":64"), 11, "\"tokens\":\"x\"");
  EXPECT_NE(refusal_of(text).find("file line 1: \"tokens\" is \"x\""), std::string::npos)
      << refusal_of(text);
  text = sample_lines();
  text.replace(text.find("\"us\":11.0"), 9, "\"us\":null");
  EXPECT_NE(refusal_of(text).find("\"steps\": \"us\" is null"), std::string::npos)
      << refusal_of(text);
  text = sample_lines();
  text.replace(text.find("\"median_us\":200.0"), 17, "\"median_us\":0.0");
  EXPECT_NE(refusal_of(text).find("legal: all more than 0"), std::string::npos);
  // Axes are logarithmic.
  for (const char* rate : {"0.0", "-1.0"}) {
    text = sample_lines();
    text.replace(text.find("\"dense_tflops\":0.25"), 19, std::string("\"dense_tflops\":") + rate);
    EXPECT_NE(refusal_of(text).find("dense_tflops is"), std::string::npos) << refusal_of(text);
  }
}

TEST(ResultFile, AFileThatIsNotThereIsIo) {
  const std::vector<std::filesystem::path> files = {"/no/such/results"};
  EXPECT_THROW(read_results(files), Error);
}

}  // namespace
}  // namespace distmoe::tools
