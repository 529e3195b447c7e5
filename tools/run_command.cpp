// SPDX-License-Identifier: Apache-2.0
//
// `distmoe run`: the experts of one layer of a checkpoint on captured input.
#include <CLI/CLI.hpp>

#include "run_options.hpp"
#include "run_session.hpp"
#include "subcommand.hpp"

namespace distmoe::tools {
namespace {

class RunCommand final : public Subcommand {
 public:
  const char* name() const noexcept override { return "run"; }
  const char* summary() const noexcept override {
    return "Run the experts of one layer over ranks and compare with a reference";
  }
  void add_options(CLI::App& app) override { add_run_options(app, options_); }
  ExitCode execute() override { return run_session(options_); }

 private:
  RunOptions options_;
};

}  // namespace

std::unique_ptr<Subcommand> make_run_command() { return std::make_unique<RunCommand>(); }

}  // namespace distmoe::tools
