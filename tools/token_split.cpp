// SPDX-License-Identifier: Apache-2.0
#include "token_split.hpp"

#include <cstddef>
#include <numeric>

#include "core/check.hpp"

namespace distmoe::tools {

std::vector<std::int64_t> split_evenly(std::int64_t count, int num_parts) {
  std::vector<std::int64_t> parts(static_cast<std::size_t>(num_parts), count / num_parts);
  for (std::int64_t part = 0; part < count % num_parts; ++part) {
    ++parts[static_cast<std::size_t>(part)];
  }
  return parts;
}

std::vector<std::int64_t> split_tokens(std::int64_t num_tokens, int num_ranks,
                                       const std::optional<std::vector<std::int64_t>>& requested) {
  if (!requested) return split_evenly(num_tokens, num_ranks);
  DISTMOE_CHECK(requested->size() == static_cast<std::size_t>(num_ranks), kInvalidArgument,
                "--tokens-per-rank has ", requested->size(), " entries for ", num_ranks,
                " ranks; it needs one a rank");
  const std::int64_t sum = std::accumulate(requested->begin(), requested->end(), std::int64_t{0});
  DISTMOE_CHECK(sum == num_tokens, kInvalidArgument, "--tokens-per-rank adds up to ", sum,
                ", but the input has ", num_tokens, " tokens");
  return *requested;
}

std::int64_t first_of_part(const std::vector<std::int64_t>& parts, int part) {
  return std::accumulate(parts.begin(), parts.begin() + part, std::int64_t{0});
}

}  // namespace distmoe::tools
