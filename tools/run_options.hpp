// SPDX-License-Identifier: Apache-2.0
//
// The options of `distmoe run`, parsed and checked. What depends on files is checked by the run
// itself.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "distmoe/config.hpp"
#include "distmoe/memory_plan.hpp"
#include "precision_options.hpp"
#include "train_options.hpp"

namespace CLI {
class App;
}

namespace distmoe::tools {

enum class Engine { kThreads, kMpi, kTcp, kNccl };

/// "threads", "mpi", "tcp", "nccl".
const char* to_string(Engine engine) noexcept;
/// "cpu", "cuda".
const char* to_string(BackendKind backend) noexcept;

/// What a command says about its ranks.
struct RankSetup {
  Engine engine = Engine::kThreads;
  BackendKind backend = BackendKind::kCpu;
  int num_thread_ranks = 1;  ///< where ranks are threads
  std::chrono::milliseconds timeout = std::chrono::seconds(300);
};

struct RunOptions {
  std::filesystem::path checkpoint;
  std::int64_t layer = 0;
  std::filesystem::path input;   ///< empty: routed_experts.safetensors of the checkpoint
  std::filesystem::path input2;  ///< empty: every call has the same input
  std::optional<int> ranks;
  std::optional<std::vector<std::int64_t>> tokens_per_rank;
  Engine engine = Engine::kThreads;
  BackendKind backend = BackendKind::kCpu;
  Combine combine = Combine::kPerRoute;
  Precision precision = Precision::kBF16;
  Pipeline pipeline = Pipeline::kStaged;
  std::optional<double> device_factor;  ///< empty: the number of ranks, which is the worst case
  std::optional<double> total_factor;   ///< empty: no host scratch
  std::chrono::milliseconds timeout = std::chrono::seconds(300);
  std::filesystem::path output;      ///< empty: none
  std::filesystem::path dump_codes;  ///< empty: none
  std::optional<double> tolerance;   ///< empty: the precision's
  std::optional<int> repeat;         ///< empty: one call an input
  bool graph = false;
  TrainOptions train;
  bool stats = false;
  bool json = false;

  std::filesystem::path input_path() const;
  double used_tolerance() const { return tolerance.value_or(default_tolerance(precision)); }
  int num_inputs() const { return input2.empty() ? 1 : 2; }
  RankSetup rank_setup() const;
  int num_calls() const { return repeat.value_or(num_inputs()); }
};

/// Options that every command with ranks has, alike.
void add_engine_option(CLI::App& app, Engine& engine);
void add_backend_option(CLI::App& app, BackendKind& backend);
void add_timeout_option(CLI::App& app, std::chrono::milliseconds& timeout);

/// Throws where options that are each legal do not go together, or not with the number of ranks.
void check_together(const RunOptions& options, int num_ranks);

/// Declares the options; parsing `app` fills `options`, which must outlive it.
void add_run_options(CLI::App& app, RunOptions& options);

}  // namespace distmoe::tools
