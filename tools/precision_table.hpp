// SPDX-License-Identifier: Apache-2.0
//
// What `distmoe compare` finds: every precision on every layer of a checkpoint, against one
// reference.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "comparison.hpp"
#include "distmoe/config.hpp"
#include "io/checkpoint.hpp"
#include "io/routed_input.hpp"

namespace distmoe::tools {

/// The token whose y is furthest from the reference, relative to the reference's row.
struct WorstRow {
  std::int64_t token = -1;  ///< -1 of no tokens with numbers
  double rel_l2 = 0.0;
};

struct PrecisionRow {
  std::int64_t layer = 0;
  Precision precision = Precision::kBF16;
  std::string refusal{};  ///< why the precision cannot hold the layer; empty where it can
  Comparison comparison{};
  WorstRow worst{};
  std::int64_t weight_bytes = 0;  ///< of all experts, biases included
};

/// Whether y and the reference have numbers, and in the same places; true of what is refused.
bool is_finite(const PrecisionRow& row);

/// One layer in every precision, with one rank on the CPU. The reference is the input's y_ref, or
/// what BF16 computes where there is none.
std::vector<PrecisionRow> compare_precisions(const Checkpoint& checkpoint, std::int64_t layer,
                                             const RoutedInputFile& input);

/// Everything that the command found.
struct PrecisionTable {
  std::string checkpoint;
  std::string architecture;
  bool has_reference = true;  ///< false: some layer has no y_ref
  std::vector<PrecisionRow> rows{};
};
std::string json_of(const PrecisionTable& table);
std::string text_of(const PrecisionTable& table);

}  // namespace distmoe::tools
