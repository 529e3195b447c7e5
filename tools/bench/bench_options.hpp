// SPDX-License-Identifier: Apache-2.0
//
// The options of `distmoe bench`, parsed and checked one by one. What depends on files, on each
// other or on the number of ranks is checked by the run itself.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "bench/bench_shape.hpp"
#include "distmoe/config.hpp"
#include "run_options.hpp"

namespace CLI {
class App;
}

namespace distmoe::tools {

/// Which steps of a call are timed. An exchange is a call whose experts return their rows as they
/// are, so that its dispatch and combine are alone.
enum class BenchMode {
  kForward,
  kDispatch,
  kGemm,
  kCombine,
  kTrain,
  kExchange,
  kExchangeDispatch,
  kExchangeCombine,
};
const char* to_string(BenchMode mode) noexcept;
bool is_exchange(BenchMode mode) noexcept;

enum class RoutingKind { kUniform, kZipf, kCaptured };

/// Relative L2 distance to a computation that quantises nothing which a layer of noise stays
/// within: rounding x, W13, h2 and W2 to codes alone takes it to about two thirds of this.
double noise_tolerance(Precision precision) noexcept;

struct BenchOptions {
  std::vector<BenchShape> shapes;
  std::vector<std::int64_t> tokens;  ///< of every rank; each with each shape
  std::optional<int> ranks;
  Engine engine = Engine::kThreads;
  BackendKind backend = BackendKind::kCpu;
  BenchMode mode = BenchMode::kForward;
  Precision precision = Precision::kBF16;
  Pipeline pipeline = Pipeline::kStaged;
  Combine combine = Combine::kPerRoute;
  std::optional<std::int64_t> num_sms;  ///< Config::num_sms
  ActivationPolicy activation_policy = ActivationPolicy::kFull;
  bool recompute = false;         ///< slots have room for inputs alone
  std::string first_of_training;  ///< the first given option of kTrain alone; empty: none
  bool graph = false;
  RoutingKind routing = RoutingKind::kUniform;
  std::filesystem::path routing_file;  ///< of kCaptured
  std::int64_t routing_layer = 0;
  bool steps = false;              ///< also time every step, in calls of their own
  bool peers = false;              ///< also time PyTorch's layers
  std::string python = "python3";  ///< that has PyTorch
  int rounds = 21;
  std::optional<double> tolerance;
  std::chrono::milliseconds timeout = std::chrono::seconds(300);
  bool json = false;

  RankSetup rank_setup() const { return {engine, backend, ranks.value_or(1), timeout}; }
  double used_tolerance() const { return tolerance.value_or(noise_tolerance(precision)); }
  /// "uniform", "zipf" or the file.
  std::string routing_text() const;
  /// The words of a command line that says the same.
  std::string command_text() const;
};

/// Throws where options that are each legal do not go together.
void check_together(const BenchOptions& options);

/// Shapes, tokens, mode, routing and training: which calls are made.
void add_call_options(CLI::App& app, BenchOptions& options);
/// Ranks, engine, backend, multiprocessors and timeout: where they are made.
void add_place_options(CLI::App& app, BenchOptions& options);

/// Declares all options; parsing `app` fills `options`, which must outlive it.
void add_bench_options(CLI::App& app, BenchOptions& options);

}  // namespace distmoe::tools
