// SPDX-License-Identifier: Apache-2.0
//
// The routing, ids and scores of one call in context memory. A saving call has a set of its own,
// which lives until its backward; calls without a backward share one.
#pragma once

#include <cstdint>
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

class MetadataSets {
 public:
  explicit MetadataSets(const ContextMemory& memory);

  const CallMetadata& forward_only() const { return forward_only_; }
  /// `index` is slot * N + layer.
  CallMetadata saved(std::int64_t index) const;

 private:
  CallMetadata forward_only_;
  CallMetadata first_saved_;  ///< set 0; each part of set i lies i parts behind it
};

}  // namespace distmoe::cpu
