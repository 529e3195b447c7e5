// SPDX-License-Identifier: Apache-2.0
//
// What the ranks of a run found, and what it makes together.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "comparison.hpp"

namespace distmoe::tools {

/// What the first rank learns from every rank.
struct RankFacts {
  std::array<ComparisonSums, 2> sums;  ///< of each input
  std::int64_t planned_bytes = 0;
  std::int64_t peak_bytes = 0;
  std::int64_t weight_bytes = 0;
  std::int64_t repeat_bitwise_equal = 1;
  std::int64_t device_scratch_peak_bytes = 0;
  std::int64_t host_scratch_peak_bytes = 0;
  std::array<std::int64_t, 3> clip_counts{};
};

/// Bytes of the rank with most, sums and counts of all.
RankFacts merge_facts(std::span<const RankFacts> ranks);

}  // namespace distmoe::tools
