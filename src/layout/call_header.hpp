// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "layout/context_buffers.hpp"
#include "layout/refusal.hpp"

namespace distmoe {

enum class CallKind : std::int32_t { kForward = 1, kSavingForward = 2, kBackward = 3 };

/// What a rank tells its peers about a call before any data moves.
struct CallHeader {
  std::int64_t context = 0;  ///< number of the context, the same on every rank
  std::int64_t index = 0;    ///< of the context's calls, from 1
  std::int64_t num_tokens = 0;
  // Where a saving forward saves, or that of a backward did; ranks must agree, or one would decide
  // otherwise than its peers.
  std::int64_t slot = 0;
  std::int64_t slot_layer = 0;
  std::int64_t slot_layers = 0;
  // Post-expert RMSNorm: the ranks of the experts take its gradient.
  float norm_eps = 0.0F;  ///< 0 where there is none
  std::int32_t norm_uses_kahan = 0;
  CallKind kind = CallKind::kForward;
  Refusal refusal{};
};
static_assert(sizeof(CallHeader) == kCallHeaderBytes);

}  // namespace distmoe
