// SPDX-License-Identifier: Apache-2.0
//
// Writes a checkpoint whose experts are quantised. docs/formats.md has the names.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "io/checkpoint.hpp"

namespace distmoe::tools {

struct QuantiseRequest {
  std::filesystem::path checkpoint;
  std::filesystem::path output;
  StoredFormat format = StoredFormat::kMxfp8;  ///< kMxfp8, kMxfp4 or kNvfp4
};

/// What was written.
struct QuantiseSummary {
  std::string architecture;
  std::int64_t num_layers = 0;
  std::int64_t num_experts = 0;   ///< of a layer
  std::int64_t num_kept = 0;      ///< of all experts, those whose codes the source has
  std::int64_t bf16_bytes = 0;    ///< that the experts' matrices have in BF16
  std::int64_t coded_bytes = 0;   ///< of their codes and scales
  std::int64_t copied_bytes = 0;  ///< of everything else
};

/// Told how many of all experts are done.
using QuantiseProgress = std::function<void(std::int64_t done, std::int64_t total)>;

/// Writes config.json and model.safetensors into a folder that does not exist yet, is empty, or has
/// what a process left that was killed here. Experts that are of the format keep their bytes;
/// tensors that are no expert's matrices are copied. Throws invalid_argument for another output,
/// unsupported for what the format cannot hold, before anything is written but for weights that are
/// no finite numbers; OutputError where writing fails.
QuantiseSummary write_quantised_checkpoint(const QuantiseRequest& request,
                                           const QuantiseProgress& progress);

}  // namespace distmoe::tools
