// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace distmoe::cuda {

/// A position in a ring of kSlots and the parity of its barriers' current use.
template <int kSlots>
struct RingPosition {
  int slot = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

}  // namespace distmoe::cuda
