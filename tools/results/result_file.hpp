// SPDX-License-Identifier: Apache-2.0
//
// What `distmoe bench --json` wrote, read again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace distmoe::tools {

struct NamedValue {
  std::string name;
  double value = 0.0;
};

struct PeerResult {
  std::string name;
  double median_us = 0.0;
  double ratio = 0.0;
  bool is_unstable = false;
};

/// A line of results: docs/command-line.md defines every value.
struct ResultRow {
  std::string shape;
  std::int64_t hidden_dim = 0;
  std::int64_t top_k = 0;
  std::int64_t experts = 0;  ///< of all ranks
  std::string mode;
  std::string backend;
  std::string engine;
  std::string routing;
  std::string precision;
  std::string combine;
  std::string variant;  ///< "", "lean", "recompute" or both
  std::string machine;
  std::string torch;
  std::string version;
  std::string date;
  std::string command;
  std::int64_t tokens = 0;
  std::int64_t ranks = 1;
  bool is_graph = false;
  double median_us = 0.0;
  double spread = 0.0;
  bool is_unstable = false;
  std::optional<double> tflops;
  std::optional<double> floor_us;
  std::optional<double> efficiency;
  std::optional<double> bound_us;
  std::optional<double> bound_ratio;
  std::optional<double> forward_us;
  std::optional<double> backward_us;
  double flops = 0.0;
  double weight_bytes = 0.0;
  std::optional<double> dense_tflops;
  std::optional<double> copy_tb_s;
  std::optional<double> read_tb_s;
  std::optional<double> write_tb_s;
  std::optional<double> link_gb_s;
  double overhead_us = 0.0;
  std::optional<double> rel_l2;  ///< empty: infinite, or no number
  double tolerance = 0.0;
  bool is_repeatable = true;
  std::vector<NamedValue> steps;
  std::vector<PeerResult> peers;
  std::vector<NamedValue> plan_bytes;  ///< of one rank, without their sum
  std::vector<std::string> missing;

  /// "train, lean", "forward, CUDA graph, zipf".
  std::string call() const;
  /// The timed call was outside the tolerance, or gave other bits than the untimed one.
  bool is_wrong() const { return !rel_l2 || !(*rel_l2 <= tolerance) || !is_repeatable; }
  /// Of memory, the fastest of all that were measured; TB/s.
  std::optional<double> memory_tb_s() const { return std::max({copy_tb_s, read_tb_s, write_tb_s}); }
};

/// The lines of `text`, empty ones left out. Throws invalid_argument that names `source`, the line
/// and the key.
std::vector<ResultRow> parse_results(std::string_view text, const std::string& source);

/// Of all files, in their order. Throws io, and invalid_argument as above or where there is no line
/// at all.
std::vector<ResultRow> read_results(std::span<const std::filesystem::path> files);

}  // namespace distmoe::tools
