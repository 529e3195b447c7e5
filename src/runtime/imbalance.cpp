// SPDX-License-Identifier: Apache-2.0
#include "runtime/imbalance.hpp"

#include <algorithm>

namespace distmoe {

std::optional<double> imbalance_of(std::span<const std::int64_t> rows) {
  double sum = 0.0;
  for (const std::int64_t count : rows) sum += static_cast<double>(count);
  if (sum == 0.0) return std::nullopt;
  const double busiest = static_cast<double>(*std::ranges::max_element(rows));
  return busiest * static_cast<double>(rows.size()) / sum;
}

}  // namespace distmoe
