// SPDX-License-Identifier: Apache-2.0
//
// `distmoe bench`: how long calls take, beside what the machine can do.
#include <CLI/CLI.hpp>

#include "bench/bench_options.hpp"
#include "bench/bench_run.hpp"
#include "core/check.hpp"
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
    DISTMOE_CHECK(options_.mode == BenchMode::kTrain || options_.first_of_training.empty(),
                  kInvalidArgument, options_.first_of_training,
                  " is an option of training: it needs --mode train");
    DISTMOE_CHECK(!options_.graph || options_.backend == BackendKind::kCuda, kInvalidArgument,
                  "--graph captures CUDA graphs: it needs --backend cuda");
    DISTMOE_CHECK(!options_.num_sms || options_.backend == BackendKind::kCuda, kInvalidArgument,
                  "--sms counts multiprocessors of a GPU: it needs --backend cuda");
    DISTMOE_CHECK(!is_exchange(options_.mode) || options_.backend == BackendKind::kCuda,
                  kUnsupported, "--mode ", to_string(options_.mode),
                  " is of the CUDA backend: on the CPU rows move within the first product's step");
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
