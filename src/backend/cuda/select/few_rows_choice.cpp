// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/select/few_rows_choice.hpp"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "core/checked_math.hpp"
#include "plan/expert_partition.hpp"

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

/// Tiles that take the place of one of each of `active` experts.
TileBatch together(const TileBatch& batch, std::int64_t active) {
  return {.count = batch.count / active, .cost = batch.cost * static_cast<double>(active)};
}

std::vector<std::int32_t> heights() {
  std::vector<std::int32_t> all;
  for (std::int32_t rows = kFewTileWeightsMin; rows <= kFewTileWeights;
       rows += kFewTileWeightsStep) {
    all.push_back(rows);
  }
  return all;
}

/// Weight rows that each route of one token may have in a tile of W2: whole swizzle atoms, at most
/// kFewTileWeights of all routes together, and at least half as many.
std::vector<std::int32_t> rows_of_a_route(std::int64_t top_k) {
  constexpr std::int32_t kAtomRows = 8;
  std::vector<std::int32_t> all;
  for (std::int32_t rows = kAtomRows; rows * top_k <= kFewTileWeights; rows += kAtomRows) {
    if (rows * top_k * 2 > kFewTileWeights) all.push_back(rows);
  }
  return all;
}

/// See kOneTokenRoutes.
bool has_tiles_of_one_token(const ChoiceInputs& inputs, const ContextChoice& choice,
                            std::int64_t num_tokens) {
  return inputs.num_ranks == 1 && num_tokens == 1 && inputs.top_k <= kOneTokenRoutes &&
         ceil_div(inputs.hidden_dim, rows_of_a_route(inputs.top_k).back()) <=
             choice.persistent_blocks &&
         ceil_div(inputs.intermediate_dim, kStageK) <= kOneTokenStages;
}

/// Room for the rows of an expert: of `mean` on average, and more than four standard deviations
/// above it hardly ever. What does not fit becomes another tile.
std::int32_t token_rows_of_a_tile(std::int64_t all_tokens, std::int64_t mean) {
  const auto expected = static_cast<double>(mean);
  const double most =
      std::min(static_cast<double>(all_tokens), expected + 4.0 * std::sqrt(expected));
  std::int32_t rows = kFewTileTokensMin;
  while (rows < kFewTileTokens && rows < most) rows *= 2;
  return rows;
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
  if (num_tokens == 0) return NotFew::kNoTokens;
  if (num_tokens > max_few_tokens(inputs.top_k)) return NotFew::kRoutes;
  const std::int64_t experts = num_local_experts(inputs.num_experts, inputs.num_ranks, 0);
  if (experts > kFewExperts) return NotFew::kExperts;
  const std::int64_t rows = num_tokens * inputs.top_k;  // of a rank, where routing is balanced
  if (rows > max_few_rows(inputs)) return NotFew::kRowsPerExpert;
  if (inputs.combine == Combine::kPerRank && inputs.num_ranks > 1) return NotFew::kSums;
  return NotFew::kNo;
}

std::int64_t max_few_rows(const ChoiceInputs& inputs) {
  return kFewRowsPerExpert * num_local_experts(inputs.num_experts, inputs.num_ranks, 0);
}

bool bounds_few_rows(const ChoiceInputs& inputs, std::int64_t max_tokens) {
  if (inputs.num_ranks == 1) return true;
  // Divided, since the product may leave 64 bits.
  return max_tokens <= max_few_rows(inputs) / inputs.top_k / inputs.num_ranks;
}

const char* reason_name(NotFew reason) {
  switch (reason) {
    case NotFew::kNo: return "none";
    case NotFew::kNoTokens: return "no_tokens";
    case NotFew::kRoutes: return "routes";
    case NotFew::kExperts: return "experts";
    case NotFew::kRowsPerExpert: return "rows_per_expert";
    case NotFew::kSums: return "sums";
  }
  return "unknown";
}

std::int64_t expected_active_experts(const ChoiceInputs& inputs, std::int64_t num_tokens) {
  const auto experts =
      static_cast<double>(num_local_experts(inputs.num_experts, inputs.num_ranks, 0));
  const double taken = static_cast<double>(inputs.top_k) / static_cast<double>(inputs.num_experts);
  const double idle = std::pow(
      1.0 - taken, static_cast<double>(inputs.num_ranks) * static_cast<double>(num_tokens));
  return std::max(std::int64_t{1}, static_cast<std::int64_t>(std::llround(experts * (1.0 - idle))));
}

std::vector<FewRowsCandidate> rank_few_rows_tiles(const ChoiceInputs& inputs,
                                                  const ContextChoice& choice,
                                                  std::int64_t num_tokens) {
  const std::int64_t active = expected_active_experts(inputs, num_tokens);
  const std::int64_t token_rows = ceil_div(num_tokens * inputs.top_k, active);
  const bool is_one_token = has_tiles_of_one_token(inputs, choice, num_tokens);
  std::vector<FewRowsCandidate> candidates;
  const auto add = [&](std::int32_t w13_rows, std::int32_t w2_rows) {
    const TileBatch w13 =
        batch_of(2 * inputs.intermediate_dim, inputs.hidden_dim, w13_rows, active, token_rows);
    TileBatch w2 =
        batch_of(inputs.hidden_dim, inputs.intermediate_dim, w2_rows, active, token_rows);
    if (is_one_token) w2 = together(w2, active);
    candidates.push_back(
        {.tiles = {.w13_rows = w13_rows,
                   .w2_rows = w2_rows,
                   .tokens = token_rows_of_a_tile(num_tokens * inputs.num_ranks, token_rows),
                   .is_one_token = is_one_token ? 1 : 0},
         .cost = end_of_last(w13, w2, choice.persistent_blocks)});
  };
  for (const std::int32_t w13_rows : heights()) {
    for (const std::int32_t w2_rows : is_one_token ? rows_of_a_route(inputs.top_k) : heights()) {
      add(w13_rows, w2_rows);
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
