// SPDX-License-Identifier: Apache-2.0
#include "run_options.hpp"

#include <CLI/CLI.hpp>
#include <cmath>
#include <limits>
#include <string>

#include "core/check.hpp"
#include "option_declaration.hpp"

namespace distmoe::tools {
namespace {

constexpr int kMaxRanks = 1024;
constexpr int kMaxRepeat = 10000;
constexpr double kMaxTimeoutSeconds = 1e6;

constexpr const char* kFooter =
    "Exit code: 0 within tolerance (or without a reference), 1 outside it, 2 wrong arguments or "
    "input,\n3 failure at run time.\n\n"
    "Results: rel_l2 = |y - y_ref| / |y_ref|; imbalance = rows of the busiest expert / mean rows "
    "of "
    "an\nexpert; seconds = median over --repeat of the call alone, the slowest rank counts; "
    "planned_bytes\nand peak_bytes (growth of anonymous memory) are per rank, the largest.\n\n"
    "Examples:\n"
    "  distmoe run --checkpoint testdata/qwen3moe --layer 0\n"
    "  distmoe run --checkpoint testdata/gptoss --layer 1 --ranks 4 --repeat 5 --stats\n"
    "  distmoe run --checkpoint DIR --layer 0 --tokens-per-rank 500,0,12 --output y.safetensors\n"
    "  distmoe run --checkpoint DIR --layer 0 --precision mxfp8 --dump-codes codes.safetensors\n"
    "  distmoe run --checkpoint DIR --layer 0 --train --slot-factor 1 --output "
    "gradients.safetensors\n"
    "  mpirun -n 4 distmoe run --checkpoint DIR --layer 0 --engine mpi --json\n"
    "  torchrun --no-python --nproc-per-node 2 distmoe run --checkpoint DIR --layer 0 "
    "--backend cuda\n    --engine nccl\n";

std::chrono::milliseconds parse_timeout(const std::string& text) {
  const double seconds = parse_real("--timeout", text, Zero::kLegal);
  DISTMOE_CHECK(seconds >= 1e-3 && seconds <= kMaxTimeoutSeconds, kInvalidArgument,
                "--timeout is '", text, "'; legal: 0.001..", kMaxTimeoutSeconds, " seconds");
  return std::chrono::milliseconds(std::llround(seconds * 1e3));
}

void add_what_to_run(CLI::App& app, RunOptions& options) {
  add_path(app, "--checkpoint", "DIR", "Hugging Face folder: config.json and safetensors files",
           options.checkpoint)
      ->required();
  add(app, "--layer", "N", "Layer of the model whose experts run", [&](const std::string& text) {
    options.layer = parse_integer("--layer", text, 0, std::numeric_limits<std::int32_t>::max());
  })->required();
  add_path(app, "--input", "FILE",
           "Safetensors file with layerN.x, layerN.topk_ids, layerN.topk_scores and, optionally, "
           "layerN.y_ref (or without the prefix) [DIR/routed_experts.safetensors]",
           options.input);
  add_path(app, "--input2", "FILE",
           "A second input of the same T and K: calls alternate between the two, and --output "
           "writes y and y2",
           options.input2);
  add_path(app, "--output", "FILE",
           "Write y as BF16 [T, D] in input order (safetensors); with --train the gradients too",
           options.output);
  add_path(app, "--dump-codes", "FILE",
           "Write the codes, scales and global scales of x, h2 and the weights (safetensors; one "
           "rank)",
           options.dump_codes);
  add(app, "--tolerance", "X",
      "Largest relative L2 distance to y_ref that is a success [bf16 8e-3, mxfp8 0.033, nvfp4 "
      "0.115, mxfp4 0.1]",
      [&](const std::string& text) {
        options.tolerance = parse_real("--tolerance", text, Zero::kLegal);
      });
  add(app, "--repeat", "N", "Run N times on one context [1, or 2 with --input2]",
      [&](const std::string& text) {
        options.repeat = static_cast<int>(parse_integer("--repeat", text, 1, kMaxRepeat));
      });
}

void add_where_to_run(CLI::App& app, RunOptions& options) {
  add(app, "--ranks", "P",
      "Expert-parallel ranks [entries of --tokens-per-rank, or 1; with processes the launcher's]",
      [&](const std::string& text) {
        options.ranks = static_cast<int>(parse_integer("--ranks", text, 1, kMaxRanks));
      });
  add(app, "--tokens-per-rank", "N0,N1,...",
      "Tokens of every rank, zero allowed; must add up [as even as possible]",
      [&](const std::string& text) {
        options.tokens_per_rank = parse_token_counts("--tokens-per-rank", text, kMaxRanks);
      });
  add_engine_option(app, options.engine);
  add_backend_option(app, options.backend);
  add(app, "--combine", "per_route|per_rank", "What travels back of a token [per_route]",
      [&](const std::string& text) {
        options.combine =
            static_cast<Combine>(parse_name("--combine", text, {"per_route", "per_rank"}));
      });
  add_precision_options(app, options.precision, options.pipeline);
  add(app, "--device-factor", "F", "Rows planned, in units of T*K of a rank [P, the worst case]",
      [&](const std::string& text) {
        options.device_factor = parse_real("--device-factor", text, Zero::kIllegal);
      });
  add(app, "--total-factor", "F", "The same with scratch in host memory [none]",
      [&](const std::string& text) {
        options.total_factor = parse_real("--total-factor", text, Zero::kIllegal);
      });
  app.add_flag("--graph", options.graph,
               "Capture the call once in a CUDA graph and replay it (--backend cuda)");
  add_timeout_option(app, options.timeout);
}

}  // namespace

const char* to_string(Engine engine) noexcept {
  constexpr const char* kNames[] = {"threads", "mpi", "tcp", "nccl"};
  return kNames[static_cast<int>(engine)];
}

const char* to_string(BackendKind backend) noexcept {
  return backend == BackendKind::kCpu ? "cpu" : "cuda";
}

void add_engine_option(CLI::App& app, Engine& engine) {
  add(app, "--engine", "threads|mpi|tcp|nccl",
      "Ranks are threads of this process; processes of mpirun; processes of torchrun; or "
      "processes of either with a GPU each [threads]",
      [&engine](const std::string& text) {
        engine =
            static_cast<Engine>(parse_name("--engine", text, {"threads", "mpi", "tcp", "nccl"}));
      });
}

void add_backend_option(CLI::App& app, BackendKind& backend) {
  add(app, "--backend", "cpu|cuda", "Where the experts run [cpu]",
      [&backend](const std::string& text) {
        backend = static_cast<BackendKind>(parse_name("--backend", text, {"cpu", "cuda"}));
      });
}

void add_timeout_option(CLI::App& app, std::chrono::milliseconds& timeout) {
  add(app, "--timeout", "S", "Seconds to wait for another rank [300]",
      [&timeout](const std::string& text) { timeout = parse_timeout(text); });
}

std::filesystem::path RunOptions::input_path() const {
  return input.empty() ? checkpoint / "routed_experts.safetensors" : input;
}

RankSetup RunOptions::rank_setup() const {
  const auto entries = tokens_per_rank ? static_cast<int>(tokens_per_rank->size()) : 1;
  return {engine, backend, ranks.value_or(entries), timeout};
}

void add_run_options(CLI::App& app, RunOptions& options) {
  app.footer(kFooter);
  add_what_to_run(app, options);
  add_where_to_run(app, options);
  add_train_options(app, options.train);
  app.add_flag("--stats", options.stats,
               "Also print times, rows and memory in detail (to stderr with --json)");
  app.add_flag("--json", options.json, "Print one JSON object on stdout and nothing else");
}

void check_together(const RunOptions& options, int num_ranks) {
  DISTMOE_CHECK(!options.ranks || *options.ranks == num_ranks, kInvalidArgument, "--ranks is ",
                options.ranks.value_or(0), ", but the launcher started ", num_ranks, " ranks");
  DISTMOE_CHECK(!options.graph || options.backend == BackendKind::kCuda, kInvalidArgument,
                "--graph captures a CUDA graph: it needs --backend cuda");
  DISTMOE_CHECK(options.backend == BackendKind::kCpu || num_ranks == 1 ||
                    options.engine == Engine::kThreads || options.engine == Engine::kNccl,
                kInvalidArgument,
                "--backend cuda runs several ranks with --engine nccl (a process ",
                "for each GPU) or threads, not with --engine ", to_string(options.engine));
  DISTMOE_CHECK(options.dump_codes.empty() || options.precision != Precision::kBF16,
                kInvalidArgument, "--dump-codes writes codes, which bf16 has none of: it needs ",
                "--precision mxfp8, nvfp4 or mxfp4");
  DISTMOE_CHECK(
      options.dump_codes.empty() || (num_ranks == 1 && options.backend == BackendKind::kCpu),
      kInvalidArgument, "--dump-codes writes the codes of one rank on the CPU, not of ", num_ranks,
      " on ", to_string(options.backend));
  DISTMOE_CHECK(options.num_calls() >= options.num_inputs(), kInvalidArgument,
                "--input2 needs --repeat 2 or more, got ", options.num_calls());
  const TrainOptions& train = options.train;
  DISTMOE_CHECK(train.is_on || train.first_given.empty(), kInvalidArgument, train.first_given,
                " is an option of training: it needs --train");
  DISTMOE_CHECK(!train.is_on || (!options.graph && options.input2.empty()), kInvalidArgument,
                "--train runs one input without a graph: --graph and --input2 are not for it");
}

}  // namespace distmoe::tools
