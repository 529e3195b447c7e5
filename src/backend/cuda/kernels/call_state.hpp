// SPDX-License-Identifier: Apache-2.0
//
// What lives on the device across calls.
#pragma once

#include <cstdint>

#include "backend/cuda/call_frame.hpp"
#include "backend/cuda/published.hpp"

namespace distmoe::cuda {

inline constexpr std::int32_t kNotRefused = -1;

/// What the host says of a call. All hosts count calls alike; a replay has the number of the call
/// that was captured.
struct CallHead {
  std::int64_t call = 0;
  std::int32_t rank = 0;
  std::int32_t refusal = kNotRefused;  ///< or the ErrorCode for which it refuses its arguments
};

/// Epochs count on the device, so that a replayed graph counts too.
struct alignas(128) CallState {
  std::uint32_t barrier_epoch[kNumBarriers];
  std::uint32_t gather_epoch;
  /// Blocks of publish_route that have done their part; 0 between calls.
  std::uint32_t published_blocks;
  /// Why this rank gave up on the others, and in which call: the fault of every later call, which
  /// writes nothing that a peer reads. Never cleared.
  FaultRecord lost;
  std::int64_t lost_call;
  /// The first fault since the last check, and the call in which it was.
  FaultRecord first_fault;
  std::int64_t first_fault_call;
  /// The most rows that scratch was placed for.
  std::int64_t peak_rows;
  /// Of the last call with clip statistics.
  unsigned long long clipped_gates;
  unsigned long long clipped_ups;
};

}  // namespace distmoe::cuda
