// SPDX-License-Identifier: Apache-2.0
//
// What the ranks of a run found, and what it makes together.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comparison.hpp"
#include "rank_group.hpp"

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

/// Collective. Of every place of `own`, equally long everywhere, the largest value of a rank.
template <typename Value>
std::vector<Value> largest_of_ranks(RankGroup& group, const std::vector<Value>& own) {
  std::vector<Value> all(own.size() * static_cast<std::size_t>(group.size()));
  group.all_gather_bytes(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)));
  std::vector<Value> largest = own;
  for (std::size_t i = 0; i < all.size(); ++i) {
    Value& value = largest[i % own.size()];
    value = std::max(value, all[i]);
  }
  return largest;
}

}  // namespace distmoe::tools
