// SPDX-License-Identifier: Apache-2.0
//
// The layers that `distmoe bench` measures.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace distmoe::tools {

struct BenchShape {
  std::string name;  ///< as reports call it
  std::int64_t hidden_dim = 0;
  std::int64_t intermediate_dim = 0;
  std::int64_t top_k = 0;
  std::int64_t num_experts = 0;
  bool are_experts_per_rank = false;  ///< num_experts is what one rank owns

  /// E of a group of `num_ranks`.
  std::int64_t experts_of(int num_ranks) const {
    return are_experts_per_rank ? num_experts * num_ranks : num_experts;
  }
  bool operator==(const BenchShape&) const = default;
};

/// "NAME" of the model table, "D,F,E,K", either with "@L" for L experts per rank in place of E, or
/// "each" for the six layers that docs/performance.md publishes. Throws invalid_argument.
std::vector<BenchShape> parse_bench_shapes(std::string_view text);

}  // namespace distmoe::tools
