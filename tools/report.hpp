// SPDX-License-Identifier: Apache-2.0
//
// What `distmoe run` says about a run. docs/command-line.md defines every value.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comparison.hpp"
#include "distmoe/context.hpp"
#include "distmoe/memory_plan.hpp"

namespace distmoe::tools {

/// Of --train.
struct TrainingReport {
  std::int64_t num_forwards = 0;    ///< of one run, and as many backwards
  std::int64_t num_recomputed = 0;  ///< of them
  RegionPeaks peaks;                ///< of the rank with most
  /// Of all ranks: gate and up activations above --clip-limit, and all; empty without it.
  std::optional<std::array<std::int64_t, 3>> clip_counts{};
};

struct RunReport {
  std::string checkpoint;
  std::string architecture;
  std::int64_t layer = 0;
  int ranks = 1;
  std::string engine;
  std::string backend;
  std::string combine;
  std::string precision;
  std::string pipeline;  ///< of block-scaled precisions, else empty
  /// Whether the weights' codes are the checkpoint's; empty where weights are BF16.
  std::optional<bool> has_stored_codes{};
  /// What the checkpoint has of the layer: "fp8"; "several formats".
  std::string stored_format{};
  std::int64_t tokens = 0;
  std::vector<std::int64_t> tokens_per_rank;
  std::vector<std::int64_t> rows_per_rank;
  std::vector<std::int64_t> rows_per_expert;
  std::vector<std::int64_t> experts_per_rank;
  std::optional<Comparison> comparison;  ///< empty without a reference
  bool is_reference_of_another_layer =
      false;  ///< there is one, but not with the RMSNorm of the run
  bool has_input2 = false;
  std::optional<Comparison> comparison2;  ///< of --input2
  double tolerance = 0.0;
  std::vector<CallStatistics> layers;  ///< of every forward of the last call, the first rank's
  std::vector<double> call_seconds;    ///< of every repeat, the slowest rank's
  std::int64_t planned_bytes = 0;
  std::int64_t peak_bytes = 0;
  std::int64_t weight_bytes = 0;  ///< of the rank with most experts
  bool repeat_bitwise_equal = true;
  std::optional<TrainingReport> training;
  MemoryPlan plan;
};

/// The middle value, the mean of the two middle ones for an even count; 0 of nothing.
double median_of(std::vector<double> values);

/// True without a reference; both inputs count.
bool is_within_tolerance(const RunReport& report);

/// A distance for people: "0.00274", or "infinite" where something that is no number is compared
/// with a number, or nothing is a number.
std::string distance_text(double distance);
/// Which elements are no numbers, for people; empty where all are.
std::string not_finite_text(const Comparison& comparison);

/// One object with the documented keys, in their order; ends with a newline.
std::string json_of(const RunReport& report);
/// For people.
std::string text_of(const RunReport& report);
/// The details of --stats.
std::string stats_text_of(const RunReport& report);

}  // namespace distmoe::tools
