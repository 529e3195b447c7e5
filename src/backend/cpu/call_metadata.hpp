// SPDX-License-Identifier: Apache-2.0
//
// The routing, ids and scores of one call in context memory. A saving call has a set of its own,
// which lives until its backward; calls without a backward share one.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "backend/cpu/context_memory.hpp"
#include "backend/cpu/routing.hpp"

namespace distmoe::cpu {

struct CallMetadata {
  std::span<std::int64_t> tokens;  ///< [P] T of every rank
  std::span<std::int32_t> ids;     ///< of all ranks, one after the other
  std::span<float> scores;         ///< [T, K]
  RoutingBuffers routing;
};

/// `saved_set` is slot * N + layer of a saving call.
CallMetadata call_metadata(const ContextMemory& memory, std::optional<std::int64_t> saved_set);

}  // namespace distmoe::cpu
