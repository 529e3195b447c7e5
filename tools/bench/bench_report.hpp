// SPDX-License-Identifier: Apache-2.0
//
// What `distmoe bench` says. docs/command-line.md defines every value.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/spread.hpp"
#include "exit_code.hpp"

namespace distmoe::tools {

/// Medians of one run, of the slowest rank. Empty: not measured here.
struct BenchCeilings {
  std::optional<double> dense_tflops;
  std::optional<double> copy_tb_s;
  std::optional<double> read_tb_s;
  std::optional<double> link_gb_s;
};

/// One shape and one number of tokens.
struct BenchRow {
  std::string shape;
  std::int64_t tokens = 0;  ///< of every rank
  Spread us;                ///< of the slowest rank of each round
  std::optional<double> tflops;
  std::optional<double> bound_us;
  std::optional<double> floor_us;
  std::optional<double> forward_us;  ///< parts of a training step
  std::optional<double> backward_us;
  std::optional<double> restore_us;  ///< a part of backward_us
  double rel_l2 = 0.0;               ///< of sampled tokens of the last timed call
  bool is_bitwise_repeatable = true;

  std::optional<double> efficiency() const;
  /// The middle 80 percent of the times lie further apart than 10 percent of the median.
  bool is_unstable() const { return us.relative() > 0.1; }
};

struct BenchReport {
  int ranks = 1;
  std::string engine;
  std::string backend;
  std::string mode;
  std::string routing;
  std::string combine;
  std::optional<std::string> activation_policy;  ///< of mode train, like recompute
  std::optional<bool> recompute;
  bool graph = false;
  int rounds = 0;
  double tolerance = 0.0;
  std::string machine;               ///< processor or device
  std::vector<std::string> missing;  ///< what could not be measured, and why
  BenchCeilings ceilings;
  std::vector<BenchRow> rows;
};

/// One object a line, with the documented keys in their order.
std::string json_of(const BenchReport& report);
/// For people.
std::string text_of(const BenchReport& report);

/// A runtime failure that names the first row whose timed call was wrong.
Failure judge(const BenchReport& report);

}  // namespace distmoe::tools
