// SPDX-License-Identifier: Apache-2.0
//
// The options of `distmoe plan`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "distmoe/config.hpp"
#include "distmoe/memory_plan.hpp"
#include "shape_options.hpp"

namespace CLI {
class App;
}

namespace distmoe::tools {

struct PlanOptions {
  ShapeOptions shape;
  std::optional<std::int64_t> layers;
  Config config;  ///< everything that no shape brings
  int ep_size = 1;
  PlanTarget target;
  std::optional<std::int64_t> budget_bytes;
  std::filesystem::path svg;  ///< empty: none
  bool json = false;
};

/// What the options ask for.
struct PlanRequest {
  std::string title;  ///< of the model or checkpoint; empty without
  Config config;
};

/// Declares the options; parsing `app` fills `options`, which must outlive it.
void add_plan_options(CLI::App& app, PlanOptions& options);

/// Looks up the model or reads the checkpoint's config.json. Throws invalid_argument where a size
/// is missing or the model is unknown, io and unsupported for a config.json.
PlanRequest request_of(const PlanOptions& options);

/// "1073741824", "80GiB", "1.5 TB": bytes, rounded down. Throws invalid_argument.
std::int64_t parse_bytes(std::string_view option, std::string_view text);

}  // namespace distmoe::tools
