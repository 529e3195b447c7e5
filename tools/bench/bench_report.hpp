// SPDX-License-Identifier: Apache-2.0
//
// What `distmoe bench` says. docs/command-line.md defines every value.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/bench_options.hpp"
#include "bench/bench_shape.hpp"
#include "bench/spread.hpp"
#include "bench/traffic.hpp"
#include "distmoe/memory_plan.hpp"
#include "exit_code.hpp"

namespace distmoe::tools {

/// Rates of the rounds of one row, of the slowest rank. Empty: not measured here.
struct BenchCeilings {
  std::optional<double> dense_tflops;
  std::optional<double> copy_tb_s;
  std::optional<double> read_tb_s;
  std::optional<double> write_tb_s;
  std::optional<double> link_gb_s;
};

/// More than this much between the tenths of the samples, in units of the median, is unstable.
inline constexpr double kUnstableSpread = 0.1;

/// Somebody else's layer in the same rounds.
struct PeerTime {
  std::string name{};
  Spread us;
  double ratio = 0.0;  ///< median over the rounds of the peer's time / the row's

  bool is_unstable() const { return us.relative() > kUnstableSpread; }
};

struct StepTime {
  std::string name{};
  double us = 0.0;  ///< median
};

/// One shape and one number of tokens.
struct BenchRow {
  BenchShape shape;
  std::int64_t tokens = 0;   ///< of every rank
  std::int64_t experts = 0;  ///< of the group
  Spread us;                 ///< of the slowest rank of each round
  CallTraffic traffic;
  BenchCeilings ceilings;
  double overhead_us = 0.0;  ///< a measurement of nothing
  std::optional<double> tflops;
  std::optional<double> bound_us;
  std::optional<double> bound_ratio;  ///< median over the rounds of the time / the bound
  std::optional<double> floor_us;
  std::optional<double> forward_us;  ///< parts of a training step
  std::optional<double> backward_us;
  std::optional<double> restore_us;  ///< a part of backward_us
  std::vector<StepTime> steps;       ///< of --steps
  std::vector<PeerTime> peers;
  MemoryPlan plan;
  double rel_l2 = 0.0;  ///< of sampled tokens of the last timed call
  bool is_bitwise_repeatable = true;

  std::optional<double> efficiency() const;
  /// The middle 80 percent of the times lie further apart than 10 percent of the median.
  bool is_unstable() const { return us.relative() > kUnstableSpread; }
};

struct BenchReport {
  int ranks = 1;
  std::string engine;
  std::string backend;
  std::string mode;
  std::string routing;
  std::string precision;
  std::string combine;
  std::optional<std::string> activation_policy;  ///< of mode train, like recompute
  std::optional<bool> recompute;
  bool graph = false;
  int rounds = 0;
  double tolerance = 0.0;
  std::string version;
  std::string date;                  ///< UTC, "2026-11-30T18:00:00Z"
  std::string command;               ///< that repeats it
  std::string machine;               ///< processor or device
  std::string torch;                 ///< its version; empty where it is no peer
  std::vector<std::string> missing;  ///< what could not be measured, and why
  std::vector<BenchRow> rows;
};

/// What the options and the present moment say.
BenchReport report_of(const BenchOptions& options, int num_ranks);

/// One object in a line, with the documented keys in their order; ends with a newline. `row` need
/// not be one of the report's.
std::string json_of(const BenchReport& report, const BenchRow& row);
/// For people.
std::string text_of(const BenchReport& report);

/// A runtime failure that names the first row whose timed call was wrong.
Failure judge(const BenchReport& report);

}  // namespace distmoe::tools
