// SPDX-License-Identifier: Apache-2.0
//
// `distmoe plan`: what a context allocates, before it does.
#include <CLI/CLI.hpp>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.hpp"
#include "destination.hpp"
#include "io/checkpoint.hpp"
#include "plan_drawing.hpp"
#include "plan_options.hpp"
#include "plan_report.hpp"
#include "standard_output.hpp"
#include "subcommand.hpp"

namespace distmoe::tools {
namespace {

class PlanCommand final : public Subcommand {
 public:
  const char* name() const noexcept override { return "plan"; }
  const char* summary() const noexcept override {
    return "Size the memory of a rank, region by region, before anything is allocated";
  }
  void add_options(CLI::App& app) override { add_plan_options(app, options_); }

  ExitCode execute() override {
    if (!options_.svg.empty()) check_destination("--svg", options_.svg, checkpoint_files());
    const PlanRequest request = request_of(options_);
    const Config& config = request.config;
    const MemoryPlan plan = plan_memory(config, options_.ep_size, options_.target);
    std::optional<BudgetReport> budget;
    if (options_.budget_bytes) {
      budget = check_budget(config, options_.ep_size, *options_.budget_bytes, options_.target);
    }
    if (!options_.svg.empty()) {
      write_file(options_.svg, svg_of({request.title, config, options_.ep_size, options_.target,
                                       options_.budget_bytes}));
    }
    std::string text;
    if (options_.json) {
      text = json_of(plan, budget);
    } else {
      if (!request.title.empty())
        text = request.title + ", P=" + std::to_string(options_.ep_size) + "\n";
      text += explain(config, plan);
      if (budget) text += explain(*budget);
    }
    write_stdout(text);
    return ExitCode::kSuccess;
  }

 private:
  std::vector<std::filesystem::path> checkpoint_files() const {
    if (options_.shape.checkpoint.empty()) return {};
    return Checkpoint::well_known_files(options_.shape.checkpoint);
  }

  PlanOptions options_;
};

}  // namespace

std::unique_ptr<Subcommand> make_plan_command() { return std::make_unique<PlanCommand>(); }

}  // namespace distmoe::tools
