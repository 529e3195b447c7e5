// SPDX-License-Identifier: Apache-2.0
#include "rank_facts.hpp"

#include <algorithm>

namespace distmoe::tools {

RankFacts merge_facts(std::span<const RankFacts> ranks) {
  RankFacts together;
  const auto keep_larger = [](std::int64_t& value, std::int64_t other) {
    value = std::max(value, other);
  };
  for (const RankFacts& rank : ranks) {
    for (std::size_t i = 0; i < together.sums.size(); ++i) together.sums[i].merge(rank.sums[i]);
    for (std::size_t i = 0; i < together.clip_counts.size(); ++i) {
      together.clip_counts[i] += rank.clip_counts[i];
    }
    keep_larger(together.planned_bytes, rank.planned_bytes);
    keep_larger(together.peak_bytes, rank.peak_bytes);
    keep_larger(together.weight_bytes, rank.weight_bytes);
    keep_larger(together.device_scratch_peak_bytes, rank.device_scratch_peak_bytes);
    keep_larger(together.host_scratch_peak_bytes, rank.host_scratch_peak_bytes);
    together.repeat_bitwise_equal =
        std::min(together.repeat_bitwise_equal, rank.repeat_bitwise_equal);
  }
  return together;
}

}  // namespace distmoe::tools
