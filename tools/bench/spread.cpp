// SPDX-License-Identifier: Apache-2.0
#include "bench/spread.hpp"

#include <algorithm>
#include <cstddef>

namespace distmoe::tools {

double percentile_of(std::vector<double> samples, double fraction) {
  if (samples.empty()) return 0.0;
  std::ranges::sort(samples);
  const double position = fraction * static_cast<double>(samples.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, samples.size() - 1);
  return samples[below] +
         (position - static_cast<double>(below)) * (samples[above] - samples[below]);
}

Spread spread_of(const std::vector<double>& samples) {
  return {percentile_of(samples, 0.5), percentile_of(samples, 0.1), percentile_of(samples, 0.9)};
}

}  // namespace distmoe::tools
