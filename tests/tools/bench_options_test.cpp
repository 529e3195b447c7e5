// SPDX-License-Identifier: Apache-2.0
// Invariant: the words after `distmoe bench` become options or a refusal that names the word and
// what is legal.
#include "bench/bench_options.hpp"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "command_line.hpp"

namespace distmoe::tools {
namespace {

using Words = std::vector<std::string>;

BenchOptions options_of(Words words) {
  words.insert(words.begin(), {"--shape", "64,32,8,2", "--tokens", "5"});
  CLI::App app;
  BenchOptions options;
  add_bench_options(app, options);
  std::ranges::reverse(words);
  app.parse(std::move(words));
  return options;
}

void expect_refused(const Words& more, const std::string& part) {
  Words words = {"bench"};
  words.insert(words.end(), more.begin(), more.end());
  const ParsedCommand parsed = parse_command_line(words);
  EXPECT_EQ(parsed.subcommand, nullptr) << part;
  EXPECT_NE(parsed.error.find(part), std::string::npos) << parsed.error;
  EXPECT_NE(parsed.error.find("distmoe bench --help"), std::string::npos) << parsed.error;
}

TEST(BenchOptions, HaveTheDocumentedDefaults) {
  const BenchOptions options = options_of({});
  ASSERT_EQ(options.shapes.size(), 1u);
  EXPECT_EQ(options.tokens, std::vector<std::int64_t>{5});
  EXPECT_FALSE(options.ranks);
  EXPECT_EQ(options.engine, Engine::kThreads);
  EXPECT_EQ(options.backend, BackendKind::kCpu);
  EXPECT_EQ(options.mode, BenchMode::kForward);
  EXPECT_EQ(options.combine, Combine::kPerRoute);
  EXPECT_EQ(options.routing, RoutingKind::kUniform);
  EXPECT_EQ(options.routing_text(), "uniform");
  EXPECT_EQ(options.rounds, 21);
  EXPECT_EQ(options.precision, Precision::kBF16);
  EXPECT_EQ(options.used_tolerance(), 8e-3);
  EXPECT_EQ(options.timeout, std::chrono::seconds(300));
  EXPECT_FALSE(options.graph || options.json || options.recompute);
  EXPECT_EQ(options.activation_policy, ActivationPolicy::kFull);
  EXPECT_EQ(options.first_of_training, "");
}

TEST(BenchOptions, HoldWhatIsGiven) {
  const BenchOptions options =
      options_of({"--shape", "each",      "--tokens", "1",           "16",   "--ranks",
                  "3",       "--engine",  "mpi",      "--mode",      "gemm", "--backend",
                  "cuda",    "--combine", "per_rank", "--routing",   "file", "--routing-layer",
                  "7",       "--rounds",  "4",        "--tolerance", "0.5",  "--timeout",
                  "2",       "--graph",   "--json"});
  EXPECT_EQ(options.shapes.size(), 7u);
  EXPECT_EQ(options.tokens, (std::vector<std::int64_t>{5, 1, 16}));
  EXPECT_EQ(options.ranks, 3);
  EXPECT_EQ(options.engine, Engine::kMpi);
  EXPECT_EQ(options.backend, BackendKind::kCuda);
  EXPECT_EQ(options.mode, BenchMode::kGemm);
  EXPECT_EQ(options.combine, Combine::kPerRank);
  EXPECT_EQ(options.routing, RoutingKind::kCaptured);
  EXPECT_EQ(options.routing_text(), "file");
  EXPECT_EQ(options.routing_layer, 7);
  EXPECT_EQ(options.rounds, 4);
  EXPECT_EQ(options.tolerance, 0.5);
  EXPECT_EQ(options.timeout, std::chrono::seconds(2));
  EXPECT_TRUE(options.graph && options.json);
  EXPECT_EQ(options_of({"--routing", "zipf"}).routing, RoutingKind::kZipf);
  const BenchOptions training =
      options_of({"--mode", "train", "--recompute", "--activation-policy", "lean"});
  EXPECT_EQ(training.mode, BenchMode::kTrain);
  EXPECT_TRUE(training.recompute);
  EXPECT_EQ(training.activation_policy, ActivationPolicy::kLean);
  const BenchOptions coded = options_of({"--precision", "nvfp4", "--pipeline", "mega"});
  EXPECT_EQ(coded.precision, Precision::kNVFP4);
  EXPECT_EQ(coded.pipeline, Pipeline::kMega);
  EXPECT_EQ(coded.used_tolerance(), noise_tolerance(Precision::kNVFP4));
  EXPECT_NE(coded.command_text().find(" --precision nvfp4 --pipeline mega"), std::string::npos);
  EXPECT_NE(training.first_of_training, "");
}

TEST(BenchOptions, WrongWordsAreNamed) {
  const Words good = {"--shape", "64,32,8,2", "--tokens", "5"};
  const auto good_and = [&](const Words& more) {
    Words words = good;
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  expect_refused({"--tokens", "5"}, "--shape");
  expect_refused({"--shape", "64,32,8,2"}, "--tokens");
  expect_refused({"--shape", "GPT-9", "--tokens", "5"}, "GPT-9");
  expect_refused({"--shape", "64,32,8,2", "--tokens", "0"}, "--tokens is '0'");
  expect_refused(good_and({"--mode", "fast"}), "forward or dispatch or gemm or combine or train");
  expect_refused(good_and({"--combine", "sum"}), "per_route or per_rank");
  expect_refused(good_and({"--activation-policy", "none"}), "full or lean");
  expect_refused(good_and({"--routing", ""}), "--routing is empty");
  expect_refused(good_and({"--routing-layer", "-1"}), "--routing-layer is '-1'");
  expect_refused(good_and({"--rounds", "10001"}), "1..10000");
  expect_refused(good_and({"--ranks", "0"}), "1..1024");
  expect_refused(good_and({"--tolerance", "nan"}), "--tolerance is 'nan'");
  expect_refused(good_and({"--timeout", "0"}), "--timeout is '0'");
  expect_refused(good_and({"--engine", "pigeon"}), "--engine is 'pigeon'");
  expect_refused(good_and({"--backend", "tpu"}), "cpu or cuda");
}

TEST(BenchOptions, HelpListsEveryOption) {
  const ParsedCommand parsed = parse_command_line({"bench", "--help"});
  for (const char* option :
       {"--shape", "--tokens", "--ranks", "--engine", "--backend", "--mode", "--graph", "--routing",
        "--routing-layer", "--combine", "--activation-policy", "--recompute", "--rounds",
        "--tolerance", "--timeout", "--json"}) {
    EXPECT_NE(parsed.output.find(option), std::string::npos) << option;
  }
  EXPECT_EQ(parsed.error, "");
}

}  // namespace
}  // namespace distmoe::tools
