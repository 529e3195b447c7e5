// SPDX-License-Identifier: Apache-2.0
//
// A row of the benchmark as every rank plans it: sizes, which tokens go where, and how many sets of
// tensors it takes that no call finds its own in a cache.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/bench_options.hpp"
#include "bench/bench_routing.hpp"
#include "bench/bench_shape.hpp"
#include "bench/traffic.hpp"
#include "distmoe/config.hpp"

namespace distmoe::tools {

/// What all rows of a run have in common.
struct BenchSetting {
  const BenchOptions& options;
  int rank = 0;
  int num_ranks = 1;
  std::int64_t cache_bytes = 0;               ///< the largest of all ranks
  int num_laps = 0;                           ///< calls of a row in the whole run
  const CapturedRouting* captured = nullptr;  ///< of RoutingKind::kCaptured
};

struct BenchCase {
  BenchShape shape;
  std::int64_t num_tokens = 0;
  Config config;
  CallTraffic traffic;  ///< mean over the sets, of forward and backward if it trains; rows: the
                        ///< largest
  std::vector<RoutedTokens> sets;  ///< this rank's tokens; calls take them in turn
  int num_weight_copies = 1;       ///< set i reads copy i % num_weight_copies

  /// Of set `set`'s first token of rank `rank` among all tokens that the case has.
  std::int64_t first_token(int set, int rank, int num_ranks) const {
    return (std::int64_t{set} * num_ranks + rank) * num_tokens;
  }
};

/// Sets that together are at least twice as large as the cache, at least two and at most as many as
/// there are laps. Throws invalid_argument for sizes and captured routing that do not fit together.
BenchCase make_bench_case(const BenchShape& shape, std::int64_t num_tokens,
                          const BenchSetting& setting);

/// How many things of `bytes` each it takes, at least `least` and at most `most`.
int copies_beyond_cache(double bytes, std::int64_t cache_bytes, int least, int most);

}  // namespace distmoe::tools
