// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

namespace distmoe::tools {

/// Where the middle 80 percent of some samples lie.
struct Spread {
  double median = 0.0;
  double p10 = 0.0;
  double p90 = 0.0;

  /// (p90 - p10) / median; 0 where the median is.
  double relative() const { return median > 0.0 ? (p90 - p10) / median : 0.0; }
};

/// The value below which `fraction` (0 to 1) of the samples lie, linear between two of them; 0 of
/// nothing.
double percentile_of(std::vector<double> samples, double fraction);

Spread spread_of(const std::vector<double>& samples);

}  // namespace distmoe::tools
