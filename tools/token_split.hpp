// SPDX-License-Identifier: Apache-2.0
//
// Which tokens and which experts a rank owns.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace distmoe::tools {

/// `count` things in `num_parts` contiguous parts that differ by one at most, the larger ones
/// first.
std::vector<std::int64_t> split_evenly(std::int64_t count, int num_parts);

/// The tokens of every rank: `requested` where given, which must have one entry a rank and add up
/// to `num_tokens` (invalid_argument otherwise), or else an even split.
std::vector<std::int64_t> split_tokens(std::int64_t num_tokens, int num_ranks,
                                       const std::optional<std::vector<std::int64_t>>& requested);

/// The sum of the parts before `part`.
std::int64_t first_of_part(const std::vector<std::int64_t>& parts, int part);

}  // namespace distmoe::tools
