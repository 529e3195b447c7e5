// SPDX-License-Identifier: Apache-2.0
//
// Where the activations of a saving forward, or of a backward, lie: decided on the device, since a
// slot is filled by the rows of the calls before. Shared by host and device.
#pragma once

#include <cstdint>

namespace distmoe::cuda {

/// Written by the slot kernels (kernels/slots.hpp); all zero in a call that failed.
struct alignas(128) TrainingFrame {
  std::uint64_t x;        ///< BF16 [R, D] gathered; 0 in a forward that recomputes
  std::uint64_t h1;       ///< BF16 [R, 2F]; 0 in a forward that recomputes
  std::uint64_t kept_x;   ///< BF16 [T, D] own rows of a layer that recomputes or is lean, else 0
  std::uint64_t kept_h3;  ///< BF16 [T, K, D] of own routes of a layer that saves, else 0
  std::int32_t is_recomputed;
  std::int32_t reserved;
};
static_assert(sizeof(TrainingFrame) == 128);

}  // namespace distmoe::cuda
