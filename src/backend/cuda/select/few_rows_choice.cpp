// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/select/few_rows_choice.hpp"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "core/checked_math.hpp"

namespace distmoe::cuda {
namespace {

/// What a tile costs beside its weights and token rows, in rows: drawing it, its epilogue.
constexpr double kFewTileOverheadRows = 4.0;

/// Equal tiles of one product.
struct TileBatch {
  std::int64_t count = 0;
  double cost = 0.0;  ///< of one
};

TileBatch batch_of(std::int64_t m, std::int64_t k, std::int64_t tile_rows, std::int64_t active,
                   std::int64_t token_rows) {
  const auto rows = static_cast<double>(std::min(tile_rows, m) + token_rows);
  return {.count = active * ceil_div(m, tile_rows),
          .cost = (rows + kFewTileOverheadRows) * static_cast<double>(k)};
}

/// When the last block ends: blocks take tiles one by one, all of `first`, then all of `second`.
double end_of_last(const TileBatch& first, const TileBatch& second, std::int64_t blocks) {
  // After the first batch some blocks are one tile ahead of the others.
  const std::int64_t waves = first.count / blocks;
  const std::int64_t late_blocks = first.count % blocks;
  const double early = static_cast<double>(waves) * first.cost;
  const double late = early + first.cost;
  const auto tiles_until = [&](double end) {
    const auto of_a_block = [&](double begin) {
      return end < begin ? 0.0 : std::floor((end - begin) / second.cost + 1e-9);
    };
    return static_cast<double>(blocks - late_blocks) * of_a_block(early) +
           static_cast<double>(late_blocks) * of_a_block(late);
  };
  const auto needed = static_cast<double>(second.count);
  const auto first_end = [&](double begin) {
    double end = begin;
    while (tiles_until(end) < needed) end += second.cost;
    return end;
  };
  const double end = std::min(first_end(early), first_end(late));
  return late_blocks > 0 ? std::max(end, late) : end;
}

}  // namespace

std::int64_t max_few_tokens(std::int64_t top_k) { return kFewRoutes / top_k; }

NotFew why_not_few(const ChoiceInputs& inputs, std::int64_t num_tokens) {
  if (inputs.num_ranks > 1) return NotFew::kPeers;
  if (num_tokens == 0) return NotFew::kNoTokens;
  if (num_tokens > max_few_tokens(inputs.top_k)) return NotFew::kRoutes;
  if (inputs.num_experts > kFewExperts) return NotFew::kExperts;
  const std::int64_t routes = num_tokens * inputs.top_k;
  if (routes > kFewRowsPerExpert * inputs.num_experts) return NotFew::kRowsPerExpert;
  return NotFew::kNo;
}

const char* reason_name(NotFew reason) {
  switch (reason) {
    case NotFew::kNo: return "none";
    case NotFew::kPeers: return "peers";
    case NotFew::kNoTokens: return "no_tokens";
    case NotFew::kRoutes: return "routes";
    case NotFew::kExperts: return "experts";
    case NotFew::kRowsPerExpert: return "rows_per_expert";
  }
  return "unknown";
}

std::int64_t expected_active_experts(const ChoiceInputs& inputs, std::int64_t num_tokens) {
  const auto experts = static_cast<double>(inputs.num_experts);
  const double idle =
      std::pow(1.0 - static_cast<double>(inputs.top_k) / experts, static_cast<double>(num_tokens));
  return std::max(std::int64_t{1}, static_cast<std::int64_t>(std::llround(experts * (1.0 - idle))));
}

std::vector<FewRowsCandidate> rank_few_rows_tiles(const ChoiceInputs& inputs,
                                                  const ContextChoice& choice,
                                                  std::int64_t num_tokens) {
  const std::int64_t active = expected_active_experts(inputs, num_tokens);
  const std::int64_t token_rows = ceil_div(num_tokens * inputs.top_k, active);
  std::vector<FewRowsCandidate> candidates;
  for (int w13_rows = kFewTileWeightsMin; w13_rows <= kFewTileWeights;
       w13_rows += kFewTileWeightsStep) {
    for (int w2_rows = kFewTileWeightsMin; w2_rows <= kFewTileWeights;
         w2_rows += kFewTileWeightsStep) {
      const TileBatch w13 =
          batch_of(2 * inputs.intermediate_dim, inputs.hidden_dim, w13_rows, active, token_rows);
      const TileBatch w2 =
          batch_of(inputs.hidden_dim, inputs.intermediate_dim, w2_rows, active, token_rows);
      candidates.push_back(
          {.tiles = {w13_rows, w2_rows}, .cost = end_of_last(w13, w2, choice.persistent_blocks)});
    }
  }
  std::ranges::sort(candidates, {}, [](const FewRowsCandidate& candidate) {
    return std::tuple(candidate.cost, -candidate.tiles.w13_rows, -candidate.tiles.w2_rows);
  });
  return candidates;
}

std::optional<FewRowsTiles> choose_few_rows(const ChoiceInputs& inputs, const ContextChoice& choice,
                                            std::int64_t num_tokens) {
  if (why_not_few(inputs, num_tokens) != NotFew::kNo) return std::nullopt;
  return rank_few_rows_tiles(inputs, choice, num_tokens).front().tiles;
}

}  // namespace distmoe::cuda
