// SPDX-License-Identifier: Apache-2.0
//
// The definition of rounding, slow and exact: look at every value of the format.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace distmoe::testing {

/// The code of the non-negative value nearest to `magnitude` in `values` (ascending, index = code);
/// of two equally near ones the even code; beyond the last value the last. Differences of these
/// formats' values are exact in FP64.
inline std::uint32_t nearest_code(const std::vector<double>& values, double magnitude) {
  std::uint32_t best = 0;
  for (std::uint32_t code = 1; code < values.size(); ++code) {
    const double distance = std::fabs(values[code] - magnitude);
    const double best_distance = std::fabs(values[best] - magnitude);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
  }
  return best;
}

}  // namespace distmoe::testing
