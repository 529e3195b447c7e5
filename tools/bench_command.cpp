// SPDX-License-Identifier: Apache-2.0
//
// `distmoe bench`: how long calls take, beside what the machine can do.
#include <CLI/CLI.hpp>

#include "bench/bench_options.hpp"
#include "bench/bench_run.hpp"
#include "rank_launch.hpp"
#include "subcommand.hpp"

namespace distmoe::tools {
namespace {

class BenchCommand final : public Subcommand {
 public:
  const char* name() const noexcept override { return "bench"; }
  const char* summary() const noexcept override {
    return "Time calls on random data beside the floor and the ceilings of this machine";
  }
  void add_options(CLI::App& app) override { add_bench_options(app, options_); }

  ExitCode execute() override {
    check_together(options_);
    SharedLayerValues values;
    return launch_ranks(
        options_.rank_setup(),
        [&](const std::shared_ptr<Communicator>& communicator, int /*ranks_in_process*/) {
          return run_bench_rank(options_, communicator, values);
        });
  }

 private:
  BenchOptions options_;
};

}  // namespace

std::unique_ptr<Subcommand> make_bench_command() { return std::make_unique<BenchCommand>(); }

}  // namespace distmoe::tools
