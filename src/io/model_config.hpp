// SPDX-License-Identifier: Apache-2.0
//
// What config.json says about the routed experts.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "io/checkpoint.hpp"

namespace distmoe {

/// How a family of models stores its experts.
enum class ExpertFamily {
  kOutputMajor,  ///< Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3: [rows, cols] as the product needs it
  kGptOss,       ///< fused; BF16 input-major or MXFP4 output-major; gate and up interleaved; biases
};

struct ModelConfig {
  std::string architecture;
  ExpertFamily family = ExpertFamily::kOutputMajor;
  LayerShape shape;
  /// Of per-expert matrices that are not BF16.
  StoredFormat coded_format = StoredFormat::kFp8Blocks;
  std::vector<std::int64_t> moe_layers;  ///< that must be there, ascending
  /// Multi-token-prediction layers follow the others and have experts of the same shape; a
  /// checkpoint may lack them.
  std::vector<std::int64_t> optional_moe_layers;
};

/// Throws io for a file that cannot be read or lacks a value, unsupported for an architecture,
/// activation or quantisation that distmoe does not know.
ModelConfig read_model_config(const std::filesystem::path& path);

}  // namespace distmoe
