// SPDX-License-Identifier: Apache-2.0
//
// Any words after the program's name: exactly one of a subcommand to run, a text to print and a
// refusal comes out, nothing is thrown, and the options of a run and of a benchmark are within
// their documented ranges. Nothing is executed.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench/bench_options.hpp"
#include "command_line.hpp"
#include "distmoe/error.hpp"
#include "run_options.hpp"

namespace {

using distmoe::tools::BenchOptions;
using distmoe::tools::RunOptions;
using Words = std::vector<std::string>;

void require(bool condition) {
  if (!condition) std::abort();
}

// One word a line: a NUL cannot be part of a word of the shell.
Words split(const std::string& text) {
  Words words(1);
  for (const char letter : text) {
    if (letter == '\n') {
      words.emplace_back();
    } else if (letter != '\0') {
      words.back() += letter;
    }
  }
  return words;
}

void check_legal(const RunOptions& options) {
  require(!options.checkpoint.empty() && options.layer >= 0 && options.layer <= INT32_MAX);
  require(!options.ranks || (*options.ranks >= 1 && *options.ranks <= 1024));
  require(options.num_calls() >= 1 && options.num_calls() <= 10000);
  require(options.timeout.count() >= 1 && options.timeout.count() <= 1'000'000'000);
  require(std::isfinite(options.used_tolerance()) && options.used_tolerance() >= 0.0);
  for (const auto& factor : {options.device_factor, options.total_factor}) {
    require(!factor || (std::isfinite(*factor) && *factor > 0.0));
  }
  if (!options.tokens_per_rank) return;
  require(!options.tokens_per_rank->empty());
  for (const std::int64_t tokens : *options.tokens_per_rank) require(tokens >= 0);
}

void check_legal(const BenchOptions& options) {
  require(!options.shapes.empty() && !options.tokens.empty());
  for (const auto& shape : options.shapes) {
    for (const std::int64_t size :
         {shape.hidden_dim, shape.intermediate_dim, shape.top_k, shape.num_experts}) {
      require(size >= 1 && size <= INT32_MAX);
    }
  }
  for (const std::int64_t tokens : options.tokens) require(tokens >= 1 && tokens <= INT32_MAX);
  require(!options.ranks || (*options.ranks >= 1 && *options.ranks <= 1024));
  require(options.rounds >= 1 && options.rounds <= 10000);
  require(options.timeout.count() >= 1 && options.timeout.count() <= 1'000'000'000);
  require(std::isfinite(options.used_tolerance()) && options.used_tolerance() >= 0.0);
  require(options.routing_layer >= 0 && options.routing_layer <= INT32_MAX);
  require(!options.routing_text().empty());
}

// The options of a subcommand by themselves, so that their values can be looked at.
template <typename Options>
void check_options(Words words, void (*add)(CLI::App&, Options&)) {
  CLI::App app;
  Options options;
  add(app, options);
  std::reverse(words.begin(), words.end());
  try {
    app.parse(std::move(words));
  } catch (const CLI::ParseError&) {
    return;
  } catch (const distmoe::Error& error) {
    require(error.code() == distmoe::ErrorCode::kInvalidArgument);
    return;
  }
  check_legal(options);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Words words = split(std::string(reinterpret_cast<const char*>(data), size));
  const auto parsed = distmoe::tools::parse_command_line(words);
  const int outcomes = (parsed.subcommand != nullptr ? 1 : 0) + (parsed.output.empty() ? 0 : 1) +
                       (parsed.error.empty() ? 0 : 1);
  require(outcomes == 1);
  check_options(words, distmoe::tools::add_run_options);
  check_options(words, distmoe::tools::add_bench_options);
  return 0;
}
