// SPDX-License-Identifier: Apache-2.0
//
// Which tensor of which file holds which expert.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/model_config.hpp"
#include "io/safetensors.hpp"

namespace distmoe {

enum class ExpertLayout {
  kPerExpert,    ///< gate [F, D], up [F, D], down [D, F] of each expert; BF16 or coded
  kFused,        ///< gate_up [E, 2F, D], gate rows first, and down [E, D, F]
  kFusedGptOss,  ///< gate_up [E, D, 2F], gate and up interleaved, and down [E, F, D]
  kMxfp4GptOss,  ///< the transposes of kFusedGptOss, as MXFP4 blocks and scales
};

/// A tensor and its file; both null where the layout has no such tensor.
struct TensorRef {
  const StoredTensor* tensor = nullptr;
  const SafetensorsFile* file = nullptr;

  explicit operator bool() const { return tensor != nullptr; }
  /// "'model.layers.0...' in /path/to/shard".
  std::string describe() const;
};

/// A matrix, with its scales where it is coded.
struct MatrixRef {
  StoredFormat format = StoredFormat::kBF16;
  TensorRef values;
  TensorRef scales;
  TensorRef global_scale;  ///< kNvfp4 alone: one FP32
};

struct PerExpertTensors {
  MatrixRef gate;
  MatrixRef up;
  MatrixRef down;
};

struct LayerTensors {
  ExpertLayout layout = ExpertLayout::kPerExpert;
  std::vector<PerExpertTensors> experts;  ///< kPerExpert, [E]
  MatrixRef gate_up;                      ///< the fused layouts, as those below
  MatrixRef down;
  TensorRef gate_up_bias;
  TensorRef down_bias;
};

/// Finds every tensor that the configuration asks for and checks its type and shape. Throws io
/// where one is missing or wrong, and where an expert-like tensor is left over: a spelling that
/// nobody reads would leave experts without weights. The result refers to `shards`; `label` names
/// the checkpoint in errors.
std::map<std::int64_t, LayerTensors> catalog_experts(const ModelConfig& config,
                                                     std::span<const SafetensorsFile> shards,
                                                     const std::string& label);

}  // namespace distmoe
