// SPDX-License-Identifier: Apache-2.0
//
// The spellings of expert tensors in public checkpoints.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "io/expert_catalog.hpp"

namespace distmoe {

/// Names within a layer. A per-expert name is <block>.experts.<expert>.<suffix>, a fused one
/// <block>.experts.<suffix>.
struct Spelling {
  ExpertLayout layout;
  std::string_view block;
  std::string_view gate;  ///< per-expert layouts only
  std::string_view up;    ///< per-expert layouts only
  std::string_view gate_up;
  std::string_view down;
};

std::span<const Spelling> spellings_of(ExpertFamily family);

/// "model.layers.<layer>.".
std::string layer_prefix(std::int64_t layer);
std::string per_expert_name(const Spelling& spelling, std::int64_t layer, std::int64_t expert,
                            std::string_view suffix);
std::string fused_name(const Spelling& spelling, std::int64_t layer, std::string_view suffix);

/// Whether a name, without its layer's prefix, is built as `spelling` builds names.
bool is_spelled(const Spelling& spelling, std::string_view name_in_layer);

/// Whether a name looks like a routed expert's. Shared experts and routers do not.
bool is_expert_like(std::string_view name);

/// N of "model.layers.N.<rest>".
std::optional<std::int64_t> layer_of(std::string_view name);

}  // namespace distmoe
