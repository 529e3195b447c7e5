// SPDX-License-Identifier: Apache-2.0
//
// Which calls have their products, and without peers all of them, in one launch of the kernel of
// few rows, and with which tiles. Pure, as kernel_choice.hpp is.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "backend/cuda/select/kernel_choice.hpp"
#include "backend/cuda/tile/few_rows_storage.hpp"

namespace distmoe::cuda {

inline constexpr const char* kFewRowsName = "sm90_bf16_few_rows";

/// Tokens of such a call at most.
std::int64_t max_few_tokens(std::int64_t top_k);

/// Why a call is none of few rows; kNo where it is one.
enum class NotFew {
  kNo,
  kNoTokens,       ///< there is nothing to compute
  kRoutes,         ///< more than kFewRoutes
  kExperts,        ///< more than kFewExperts on this rank
  kRowsPerExpert,  ///< more than kFewRowsPerExpert, on average
  kSums,           ///< combine per_rank with peers: results would take the place of gathered rows
};
NotFew why_not_few(const ChoiceInputs& inputs, std::int64_t num_tokens);
const char* reason_name(NotFew reason);

/// Rows of a rank up to which this kernel computes a call.
std::int64_t max_few_rows(const ChoiceInputs& inputs);

/// Whether no call of few tokens of a context that takes `max_tokens` tokens a rank has more rows
/// than max_few_rows() on a rank. Where peers may send more, both this kernel and the grouped
/// products are launched, and the device, which knows the rows, lets one of them compute.
bool bounds_few_rows(const ChoiceInputs& inputs, std::int64_t max_tokens);

/// Experts of a rank that get a row where every rank has `num_tokens` tokens, expected of uniform
/// routing to distinct experts.
std::int64_t expected_active_experts(const ChoiceInputs& inputs, std::int64_t num_tokens);

/// A pair of tile heights and what it costs: when the last of the blocks ends, that draw the tiles
/// of W13, then those of W2, in elements of the weights that a block reads until then.
struct FewRowsCandidate {
  FewRowsTiles tiles;
  double cost = 0.0;
};

/// All pairs, the cheapest first, of equals the one with higher tiles.
std::vector<FewRowsCandidate> rank_few_rows_tiles(const ChoiceInputs& inputs,
                                                  const ContextChoice& choice,
                                                  std::int64_t num_tokens);

/// The tiles of a call of few rows, none for another one.
std::optional<FewRowsTiles> choose_few_rows(const ChoiceInputs& inputs, const ContextChoice& choice,
                                            std::int64_t num_tokens);

}  // namespace distmoe::cuda
