// SPDX-License-Identifier: Apache-2.0
//
// The options that say a layer's sizes. They come from --model or --checkpoint, and options that
// give a size of their own win over it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "distmoe/config.hpp"

namespace CLI {
class App;
}

namespace distmoe::tools {

struct ShapeOptions {
  std::string model;                 ///< empty: none
  std::filesystem::path checkpoint;  ///< empty: none
  std::optional<std::int64_t> hidden_dim;
  std::optional<std::int64_t> intermediate_dim;
  std::optional<std::int64_t> top_k;
  std::optional<std::int64_t> num_experts;
};

/// Declares the options; parsing `app` fills `options`, which must outlive it.
void add_shape_options(CLI::App& app, ShapeOptions& options);

/// Looks up the model or reads the checkpoint's config.json, and sets D, F, K, E, the activation
/// and the MoE layers (1 without a model) of `config`. The title: name of the model or
/// architecture, empty without. Throws invalid_argument where a size is missing or the model is
/// unknown, io and unsupported for a config.json.
std::string apply_shape(const ShapeOptions& options, Config& config);

}  // namespace distmoe::tools
