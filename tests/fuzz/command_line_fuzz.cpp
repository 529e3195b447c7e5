// SPDX-License-Identifier: Apache-2.0
//
// Any words after the program's name: exactly one of a subcommand to run, a text to print and a
// refusal comes out, nothing is thrown, and a run's options are within their documented ranges.
// Nothing is executed.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "command_line.hpp"
#include "distmoe/error.hpp"
#include "run_options.hpp"

namespace {

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
  require(std::isfinite(options.tolerance) && options.tolerance >= 0.0);
  for (const auto& factor : {options.device_factor, options.total_factor}) {
    require(!factor || (std::isfinite(*factor) && *factor > 0.0));
  }
  if (!options.tokens_per_rank) return;
  require(!options.tokens_per_rank->empty());
  for (const std::int64_t tokens : *options.tokens_per_rank) require(tokens >= 0);
}

// The options of `run` by themselves, so that their values can be looked at.
void check_run_options(Words words) {
  CLI::App app;
  RunOptions options;
  distmoe::tools::add_run_options(app, options);
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
  check_run_options(words);
  return 0;
}
