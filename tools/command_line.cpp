// SPDX-License-Identifier: Apache-2.0
#include "command_line.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <utility>

#include "distmoe/version.hpp"
#include "standard_output.hpp"

namespace distmoe::tools {
namespace {

constexpr std::unique_ptr<Subcommand> (*kMakers[])() = {
    make_run_command,      make_compare_command, make_plan_command,   make_explain_kernels_command,
    make_quantize_command, make_bench_command,   make_report_command, make_trace_command,
    make_info_command,     make_doctor_command};

constexpr const char* kDescription =
    "Runs the routed experts of Mixture-of-Experts layers over expert-parallel ranks.";
constexpr const char* kFooter =
    "'distmoe SUBCOMMAND --help' explains the options of a subcommand.\n\n"
    "Examples:\n"
    "  distmoe run --checkpoint testdata/qwen3moe --layer 0 --ranks 4\n"
    "  distmoe compare --checkpoint testdata/gptoss\n"
    "  distmoe plan --model DeepSeek-V3 --tokens 4096 --ep 32\n"
    "  distmoe explain-kernels --model Qwen3-30B-A3B --tokens 64 8192\n"
    "  distmoe quantize --checkpoint testdata/qwen3moe --format nvfp4 --output "
    "/tmp/qwen3moe-nvfp4\n"
    "  distmoe bench --shape Qwen3-30B-A3B --tokens 64 1024\n"
    "  distmoe report results.jsonl -o report.html\n"
    "  distmoe trace --shape Qwen3-30B-A3B --tokens 256 --ranks 2 -o trace.json\n"
    "  distmoe info --json\n"
    "  distmoe doctor\n";

// The subcommand that the words name, for the hint under an error.
std::string help_command(const CLI::App& app) {
  const auto selected = app.get_subcommands();
  return selected.empty() ? "distmoe --help" : "distmoe " + selected[0]->get_name() + " --help";
}

std::string refusal(const CLI::App& app, const std::string& reason) {
  return reason + (reason.empty() || reason.back() != '.' ? "." : "") + " See '" +
         help_command(app) + "'.";
}

using Subcommands = std::vector<std::unique_ptr<Subcommand>>;

// CLI11 takes an unknown subcommand for a missing one. Empty where the first word is neither.
std::string unknown_subcommand(const std::vector<std::string>& words,
                               const Subcommands& subcommands) {
  if (words.empty() || words[0].starts_with('-')) return {};
  std::string legal;
  for (const auto& subcommand : subcommands) {
    if (subcommand->name() == words[0]) return {};
    legal += (legal.empty() ? "" : ", ") + std::string(subcommand->name());
  }
  return "there is no subcommand '" + words[0] + "'; legal: " + legal;
}

}  // namespace

ParsedCommand parse_command_line(std::vector<std::string> words) {
  CLI::App app(kDescription, "distmoe");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string("distmoe ") + version(), "Print the version");
  app.require_subcommand(1);
  Subcommands subcommands;
  for (const auto maker : kMakers) {
    subcommands.push_back(maker());
    subcommands.back()->add_options(
        *app.add_subcommand(subcommands.back()->name(), subcommands.back()->summary()));
  }

  ParsedCommand parsed;
  const std::string unknown = unknown_subcommand(words, subcommands);
  if (!unknown.empty()) {
    parsed.error = refusal(app, unknown);
    return parsed;
  }
  // CLI11 takes the words from the back.
  std::reverse(words.begin(), words.end());
  try {
    app.parse(std::move(words));
  } catch (const CLI::CallForHelp&) {
    parsed.output = app.help();
  } catch (const CLI::CallForAllHelp&) {
    parsed.output = app.help("", CLI::AppFormatMode::All);
  } catch (const CLI::CallForVersion& version_text) {
    parsed.output = std::string(version_text.what()) + '\n';
  } catch (const CLI::ParseError& error) {
    parsed.error = refusal(app, error.what());
  } catch (const Error& error) {
    parsed.error = refusal(app, error.what());
  }
  if (!parsed.output.empty() || !parsed.error.empty()) return parsed;
  const std::string selected = app.get_subcommands().front()->get_name();
  for (auto& subcommand : subcommands) {
    if (subcommand->name() == selected) parsed.subcommand = std::move(subcommand);
  }
  return parsed;
}

ExitCode run_command_line(std::vector<std::string> words) {
  try {
    const ParsedCommand parsed = parse_command_line(std::move(words));
    if (parsed.subcommand) return parsed.subcommand->execute();
    if (!parsed.error.empty()) {
      print_error(parsed.error);
      return ExitCode::kWrongArguments;
    }
    write_stdout(parsed.output);
    return ExitCode::kSuccess;
  } catch (...) {
    const Failure failure = failure_of_current_exception();
    print_error(failure.message);
    return failure.exit_code;
  }
}

}  // namespace distmoe::tools
