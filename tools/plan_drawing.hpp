// SPDX-License-Identifier: Apache-2.0
//
// `distmoe plan --svg`: a bar of the regions, to scale, and the bytes of each region against
// max_tokens, with the planned value and the budget marked. One self-contained SVG.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "distmoe/config.hpp"
#include "distmoe/memory_plan.hpp"

namespace distmoe::tools {

struct PlanDrawing {
  std::string title;  ///< of the model; may be empty
  Config config;
  int ep_size = 1;
  PlanTarget target;
  std::optional<std::int64_t> budget_bytes;
};

/// Throws as plan_memory does for the configuration.
std::string svg_of(const PlanDrawing& drawing);

}  // namespace distmoe::tools
