// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_routing.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <utility>

#include "bench/random_values.hpp"
#include "core/check.hpp"
#include "formats/bf16.hpp"
#include "io/routed_input.hpp"

namespace distmoe::tools {
namespace {

constexpr std::uint64_t kPopularitySeed = 0x5EED;

/// In (0, 1].
double fraction(RandomBits& random) {
  return static_cast<double>((random.next() >> 11) + 1) * 0x1p-53;
}

std::vector<std::int32_t> all_experts(std::int64_t num_experts) {
  std::vector<std::int32_t> experts(static_cast<std::size_t>(num_experts));
  std::iota(experts.begin(), experts.end(), 0);
  return experts;
}

/// Moves `count` random entries to the front.
void draw_front(std::vector<std::int32_t>& experts, std::size_t count, RandomBits& random) {
  for (std::size_t i = 0; i < count; ++i) {
    std::swap(experts[i], experts[i + random.below(experts.size() - i)]);
  }
}

void add_scores(RoutedTokens& tokens, std::int64_t top_k, RandomBits& random) {
  tokens.scores.resize(tokens.ids.size());
  for (float& score : tokens.scores) {
    score = static_cast<float>((0.5 + fraction(random)) / static_cast<double>(top_k));
  }
}

template <typename Value>
std::vector<Value> copy_of(const TensorView& view) {
  const auto* data = static_cast<const Value*>(view.data);
  return {data, data + view.num_elements()};
}

}  // namespace

RoutedTokens uniform_routing(const RoutingSize& size, std::uint64_t seed) {
  RandomBits random(seed);
  std::vector<std::int32_t> experts = all_experts(size.num_experts);
  const auto count = static_cast<std::size_t>(size.top_k);
  RoutedTokens tokens;
  for (std::int64_t token = 0; token < size.num_tokens; ++token) {
    draw_front(experts, count, random);
    tokens.ids.insert(tokens.ids.end(), experts.begin(), experts.begin() + size.top_k);
  }
  add_scores(tokens, size.top_k, random);
  return tokens;
}

RoutedTokens zipf_routing(const RoutingSize& size, std::uint64_t seed) {
  RandomBits order(kPopularitySeed);
  std::vector<std::int32_t> by_popularity = all_experts(size.num_experts);
  draw_front(by_popularity, by_popularity.size(), order);

  // Weighted draws without replacement are the K smallest of E exponential times, each divided by
  // its expert's weight.
  RandomBits random(seed);
  std::vector<std::pair<double, std::int32_t>> arrivals(by_popularity.size());
  RoutedTokens tokens;
  for (std::int64_t token = 0; token < size.num_tokens; ++token) {
    for (std::size_t n = 0; n < arrivals.size(); ++n) {
      arrivals[n] = {-std::log(fraction(random)) * static_cast<double>(n + 1), by_popularity[n]};
    }
    std::partial_sort(arrivals.begin(), arrivals.begin() + size.top_k, arrivals.end());
    for (std::int64_t k = 0; k < size.top_k; ++k) {
      tokens.ids.push_back(arrivals[static_cast<std::size_t>(k)].second);
    }
  }
  add_scores(tokens, size.top_k, random);
  return tokens;
}

CapturedRouting CapturedRouting::open(const std::filesystem::path& path, std::int64_t layer) {
  const RoutedInputFile file = RoutedInputFile::open(path, layer);
  DISTMOE_CHECK(file.num_tokens() > 0, kInvalidArgument, "--routing ", path, " has no tokens");
  CapturedRouting routing;
  routing.path_ = path.string();
  routing.num_tokens_ = file.num_tokens();
  routing.top_k_ = file.top_k();
  const TensorView& ids = file.input().topk_ids_TK;
  if (ids.dtype == DType::kI64) {
    routing.ids_ = copy_of<std::int64_t>(ids);
  } else {
    const std::vector<std::int32_t> narrow = copy_of<std::int32_t>(ids);
    routing.ids_.assign(narrow.begin(), narrow.end());
  }
  const TensorView& scores = file.input().topk_scores_TK;
  if (scores.dtype == DType::kF32) {
    routing.scores_ = copy_of<float>(scores);
  } else {
    for (const BF16 score : copy_of<BF16>(scores)) routing.scores_.push_back(to_float(score));
  }
  return routing;
}

RoutedTokens CapturedRouting::take(const RoutingSize& size, std::int64_t first_token) const {
  DISTMOE_CHECK(size.top_k == top_k_, kInvalidArgument, "--routing ", path_, " has ", top_k_,
                " experts a token, but the shape has K = ", size.top_k);
  RoutedTokens tokens;
  for (std::int64_t token = 0; token < size.num_tokens; ++token) {
    const std::int64_t first = (first_token + token) % num_tokens_ * top_k_;
    for (std::int64_t route = first; route < first + top_k_; ++route) {
      const std::int64_t id = ids_[static_cast<std::size_t>(route)];
      DISTMOE_CHECK(id >= -1 && id < size.num_experts, kInvalidArgument, "--routing ", path_,
                    " names expert ", id, ", but the shape has E = ", size.num_experts);
      tokens.ids.push_back(static_cast<std::int32_t>(id));
      tokens.scores.push_back(scores_[static_cast<std::size_t>(route)]);
    }
  }
  return tokens;
}

bool has_repeated_experts(const RoutedTokens& tokens, std::int64_t top_k) {
  for (auto row = tokens.ids.begin(); row != tokens.ids.end(); row += top_k) {
    for (auto id = row; id != row + top_k; ++id) {
      if (*id >= 0 && std::find(row, id, *id) != id) return true;
    }
  }
  return false;
}

}  // namespace distmoe::tools
