// SPDX-License-Identifier: Apache-2.0
//
// `distmoe report`: results of `distmoe bench --json` as a page that a browser shows.
#include <CLI/CLI.hpp>
#include <filesystem>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "destination.hpp"
#include "option_declaration.hpp"
#include "results/result_file.hpp"
#include "results/result_page.hpp"
#include "results/result_tables.hpp"
#include "standard_output.hpp"
#include "subcommand.hpp"

namespace distmoe::tools {
namespace {

constexpr int kMaxFiles = 1000;

constexpr const char* kFooter =
    "One HTML page, complete in itself: roofline of every shape, efficiency beside peers, where "
    "the "
    "time goes,\nscaling over tokens and ranks, memory plan. 'distmoe bench --steps --peers "
    "--json' "
    "has everything for it.\n\n"
    "Exit code: 0, 2 wrong arguments or files, 3 the page cannot be written.\n\n"
    "Examples:\n"
    "  distmoe bench --shape each --tokens 64 1024 --steps --peers --json > results.jsonl\n"
    "  distmoe report results.jsonl -o report.html\n"
    "  distmoe report results.jsonl --markdown\n";

class ReportCommand final : public Subcommand {
 public:
  const char* name() const noexcept override { return "report"; }
  const char* summary() const noexcept override {
    return "Turn results of 'bench --json' into one page for a browser";
  }

  void add_options(CLI::App& app) override {
    app.footer(kFooter);
    app.add_option_function<std::vector<std::string>>(
           "RESULTS",
           [this](const std::vector<std::string>& texts) {
             files_ = {texts.begin(), texts.end()};
           },
           "Files with lines of 'distmoe bench --json'")
        ->expected(1, kMaxFiles)
        ->required();
    add_path(app, "--output,-o", "FILE", "Where the page goes", output_);
    app.add_flag("--markdown", is_markdown_, "Print a table for documents on stdout");
  }

  ExitCode execute() override {
    DISTMOE_CHECK(!output_.empty() || is_markdown_, kInvalidArgument,
                  "give -o FILE for a page, --markdown for a table, or both");
    if (!output_.empty()) check_destination("--output", output_, files_);
    const std::vector<ResultRow> rows = read_results(files_);
    if (!output_.empty()) write_file(output_, page_of(rows));
    if (is_markdown_) write_stdout(markdown_of(rows));
    return ExitCode::kSuccess;
  }

 private:
  std::vector<std::filesystem::path> files_;
  std::filesystem::path output_;
  bool is_markdown_ = false;
};

}  // namespace

std::unique_ptr<Subcommand> make_report_command() { return std::make_unique<ReportCommand>(); }

}  // namespace distmoe::tools
