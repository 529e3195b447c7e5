// SPDX-License-Identifier: Apache-2.0
//
// Which experts the tokens of a benchmark name. The same seed gives the same ids everywhere.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace distmoe::tools {

struct RoutingSize {
  std::int64_t num_tokens = 0;
  std::int64_t top_k = 0;
  std::int64_t num_experts = 0;
};

/// Ids and scores [T, K] of one rank's tokens.
struct RoutedTokens {
  std::vector<std::int32_t> ids;
  std::vector<float> scores;
};

/// K distinct experts, all equally likely. Scores lie around 1 / K.
RoutedTokens uniform_routing(const RoutingSize& size, std::uint64_t seed);

/// K distinct experts, drawn one after the other where the n-th most popular expert weighs 1 / n.
/// Which expert is how popular is one random order for every seed: the hot ones are the same in
/// every call and on every rank.
RoutedTokens zipf_routing(const RoutingSize& size, std::uint64_t seed);

/// Ids and scores that a router gave, read from a file such as `distmoe run` takes as input.
class CapturedRouting {
 public:
  /// Throws io and invalid_argument as RoutedInputFile does, and for a file without tokens.
  static CapturedRouting open(const std::filesystem::path& path, std::int64_t layer);

  /// T tokens in the order of the file from `first_token` on, from the start again after its end.
  /// Throws invalid_argument where the file has another K, or an id outside [-1, E).
  RoutedTokens take(const RoutingSize& size, std::int64_t first_token) const;

 private:
  CapturedRouting() = default;
  std::string path_;
  std::int64_t num_tokens_ = 0;
  std::int64_t top_k_ = 0;
  std::vector<std::int64_t> ids_;
  std::vector<float> scores_;
};

/// Whether a token names an expert twice.
bool has_repeated_experts(const RoutedTokens& tokens, std::int64_t top_k);

}  // namespace distmoe::tools
