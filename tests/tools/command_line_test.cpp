// SPDX-License-Identifier: Apache-2.0
// Invariant: words either become a subcommand that is ready to run, a text to print, or a refusal
// that says what is wrong and where help is; never two of them.
#include "command_line.hpp"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>

#include "run_options.hpp"

namespace distmoe::tools {
namespace {

using Words = std::vector<std::string>;

Words run_words(const Words& more = {}) {
  Words words{"run", "--checkpoint", "dir", "--layer", "1"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

void expect_refused(const Words& words, const std::string& reason) {
  const ParsedCommand parsed = parse_command_line(words);
  EXPECT_EQ(parsed.subcommand, nullptr);
  EXPECT_TRUE(parsed.output.empty());
  EXPECT_NE(parsed.error.find(reason), std::string::npos) << "error: " << parsed.error;
  EXPECT_NE(parsed.error.find("--help'"), std::string::npos) << "error: " << parsed.error;
}

RunOptions options_of(const Words& more) {
  CLI::App app;
  RunOptions options;
  add_run_options(app, options);
  Words words = run_words(more);
  words.erase(words.begin());
  std::reverse(words.begin(), words.end());
  app.parse(words);
  return options;
}

TEST(CommandLine, SelectsSubcommands) {
  const ParsedCommand run = parse_command_line(run_words());
  ASSERT_NE(run.subcommand, nullptr) << run.error;
  EXPECT_STREQ(run.subcommand->name(), "run");
  const ParsedCommand info = parse_command_line({"info", "--json"});
  ASSERT_NE(info.subcommand, nullptr) << info.error;
  EXPECT_STREQ(info.subcommand->name(), "info");
}

TEST(CommandLine, PrintsHelpAndVersion) {
  for (const Words& words : {Words{"--help"}, {"-h"}, {"run", "--help"}, {"info", "--help"}}) {
    const ParsedCommand parsed = parse_command_line(words);
    EXPECT_NE(parsed.output.find("Examples:"), std::string::npos) << words[0];
    EXPECT_TRUE(parsed.error.empty());
  }
  EXPECT_NE(parse_command_line({"run", "--help"}).output.find("--tokens-per-rank"),
            std::string::npos);
  EXPECT_EQ(parse_command_line({"--version"}).output.rfind("distmoe ", 0), 0u);
}

TEST(CommandLine, RefusesMissingAndUnknownWords) {
  expect_refused({}, "subcommand");
  expect_refused({"fly"}, "fly");
  expect_refused({"run"}, "--checkpoint");
  expect_refused({"run", "--checkpoint", "dir"}, "--layer");
  expect_refused(run_words({"--fast"}), "--fast");
  expect_refused(run_words({"extra"}), "extra");
  expect_refused(run_words({"--layer", "2"}), "--layer");
  expect_refused({"run", "--layer", "1", "--checkpoint"}, "--checkpoint");
  expect_refused({"info", "--layer", "1"}, "--layer");
}

TEST(CommandLine, RefusesIllegalValuesWithTheLegalOnes) {
  expect_refused({"run", "--checkpoint", "dir", "--layer", "-1"}, "0..2147483647");
  expect_refused({"run", "--checkpoint", "", "--layer", "1"}, "--checkpoint is empty");
  expect_refused(run_words({"--ranks", "0"}), "1..1024");
  expect_refused(run_words({"--ranks", "2.5"}), "1..1024");
  expect_refused(run_words({"--engine", "gloo"}), "threads or mpi or tcp or nccl");
  expect_refused(run_words({"--backend", "tpu"}), "cpu or cuda");
  expect_refused(run_words({"--combine", "per_token"}), "per_route or per_rank");
  expect_refused(run_words({"--device-factor", "0"}), "> 0");
  expect_refused(run_words({"--total-factor", "nan"}), "> 0");
  expect_refused(run_words({"--timeout", "1e-9"}), "0.001");
  expect_refused(run_words({"--tolerance", "-1"}), ">= 0");
  expect_refused(run_words({"--repeat", "0"}), "1..10000");
  expect_refused(run_words({"--tokens-per-rank", "1,x"}), "--tokens-per-rank is 'x'");
  std::string counts = "0";
  for (int rank = 1; rank < 1024; ++rank) counts += ",0";
  EXPECT_EQ(options_of({"--tokens-per-rank", counts}).tokens_per_rank->size(), 1024u);
  expect_refused(run_words({"--tokens-per-rank", counts + ",0"}), "1025 entries; legal: 1..1024");
}

TEST(RunOptions, HaveTheDocumentedDefaults) {
  const RunOptions options = options_of({});
  EXPECT_EQ(options.checkpoint, "dir");
  EXPECT_EQ(options.layer, 1);
  EXPECT_EQ(options.input_path(), "dir/routed_experts.safetensors");
  EXPECT_FALSE(options.ranks || options.tokens_per_rank);
  EXPECT_FALSE(options.device_factor || options.total_factor);
  EXPECT_EQ(options.engine, Engine::kThreads);
  EXPECT_EQ(options.backend, BackendKind::kCpu);
  EXPECT_EQ(options.combine, Combine::kPerRoute);
  EXPECT_EQ(options.timeout, std::chrono::seconds(300));
  EXPECT_TRUE(options.output.empty());
  EXPECT_EQ(options.used_tolerance(), 8e-3);
  EXPECT_EQ(options.num_calls(), 1);
  EXPECT_FALSE(options.stats || options.json);
}

TEST(RunOptions, HoldWhatIsGiven) {
  const RunOptions options = options_of({"--input",
                                         "in",
                                         "--ranks",
                                         "3",
                                         "--tokens-per-rank=5,0,7",
                                         "--engine",
                                         "mpi",
                                         "--backend",
                                         "cuda",
                                         "--combine",
                                         "per_rank",
                                         "--device-factor",
                                         "1.25",
                                         "--total-factor",
                                         "4",
                                         "--timeout",
                                         "0.5",
                                         "--output",
                                         "out",
                                         "--tolerance",
                                         "0",
                                         "--repeat",
                                         "9",
                                         "--stats",
                                         "--json"});
  EXPECT_EQ(options.input_path(), "in");
  EXPECT_EQ(options.ranks, 3);
  EXPECT_EQ(options.tokens_per_rank, (std::vector<std::int64_t>{5, 0, 7}));
  EXPECT_EQ(options.engine, Engine::kMpi);
  EXPECT_EQ(options.backend, BackendKind::kCuda);
  EXPECT_EQ(options.combine, Combine::kPerRank);
  EXPECT_EQ(options.device_factor, 1.25);
  EXPECT_EQ(options.total_factor, 4.0);
  EXPECT_EQ(options.timeout, std::chrono::milliseconds(500));
  EXPECT_EQ(options.output, "out");
  EXPECT_EQ(options.tolerance, 0.0);
  EXPECT_EQ(options.repeat, 9);
  EXPECT_TRUE(options.stats && options.json);
}

}  // namespace
}  // namespace distmoe::tools
