// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "formats/bf16.hpp"

namespace distmoe::cpu {

/// All 65,536 values.
inline std::vector<BF16> every_bf16() {
  std::vector<BF16> all;
  all.reserve(0x10000u);
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    all.push_back(BF16{static_cast<std::uint16_t>(bits)});
  }
  return all;
}

}  // namespace distmoe::cpu
