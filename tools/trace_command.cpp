// SPDX-License-Identifier: Apache-2.0
//
// `distmoe trace`: where the time of one call goes, step by step on every rank.
#include <CLI/CLI.hpp>
#include <filesystem>

#include "bench/bench_options.hpp"
#include "core/check.hpp"
#include "destination.hpp"
#include "option_declaration.hpp"
#include "rank_launch.hpp"
#include "subcommand.hpp"
#include "trace/trace_run.hpp"

namespace distmoe::tools {
namespace {

constexpr int kMaxRounds = 10000;

constexpr const char* kFooter =
    "Writes the steps of one call on random data, a line a rank, in the Trace Event Format: open "
    "the file in\nui.perfetto.dev or chrome://tracing. A build with CUDA gives profilers NVTX "
    "ranges "
    "of the same names.\n\n"
    "Exit code: 0, 2 wrong arguments or files, 3 failure at run time.\n\n"
    "Examples:\n"
    "  distmoe trace --shape Qwen3-30B-A3B --tokens 256 --ranks 2 -o trace.json\n"
    "  distmoe trace --shape 2048,768,64,8 --tokens 64 --mode train -o trace.json\n"
    "  distmoe trace --shape gpt-oss-120b --tokens 8192 --ranks 2 --backend cuda -o trace.json\n";

class TraceCommand final : public Subcommand {
 public:
  TraceCommand() { options_.rounds = 3; }

  const char* name() const noexcept override { return "trace"; }
  const char* summary() const noexcept override {
    return "Write one call's steps on every rank for a trace viewer";
  }

  void add_options(CLI::App& app) override {
    app.footer(kFooter);
    add_call_options(app, options_);
    add_place_options(app, options_);
    add_count(app, "--rounds", "Calls before the traced one [3]", kMaxRounds,
              [this](std::int64_t value) { options_.rounds = static_cast<int>(value); });
    add_path(app, "--output,-o", "FILE", "Where the trace goes", output_)->required();
  }

  ExitCode execute() override {
    check_together(options_);
    DISTMOE_CHECK(options_.shapes.size() == 1 && options_.tokens.size() == 1, kInvalidArgument,
                  "a trace is of one call: give one --shape and one --tokens");
    DISTMOE_CHECK(options_.mode == BenchMode::kForward || options_.mode == BenchMode::kTrain ||
                      options_.mode == BenchMode::kExchange,
                  kInvalidArgument, "--mode ", to_string(options_.mode),
                  " times some steps of a call; a trace has them all: forward, train or exchange");
    check_destination("--output", output_, {options_.routing_file});
    SharedLayerValues values;
    return launch_ranks(
        options_.rank_setup(),
        [&](const std::shared_ptr<Communicator>& communicator, int /*ranks_in_process*/) {
          return run_trace_rank(options_, output_, communicator, values);
        });
  }

 private:
  BenchOptions options_;
  std::filesystem::path output_;
};

}  // namespace

std::unique_ptr<Subcommand> make_trace_command() { return std::make_unique<TraceCommand>(); }

}  // namespace distmoe::tools
