// SPDX-License-Identifier: Apache-2.0
//
// Runs a problem on a case and brings y of all ranks together.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "conformance/moe_call.hpp"
#include "conformance/moe_case.hpp"
#include "conformance/moe_problem.hpp"
#include "conformance/placed_call.hpp"

namespace distmoe::conformance {

using TokenCounts = std::vector<std::int64_t>;  ///< of every rank

/// The shape with widths that the case's backend takes: CUDA wants multiples of 8.
MoeShape fit(MoeShape shape, const MoeCase& moe_case);

/// Contiguous blocks, as even as possible.
TokenCounts even_split(std::int64_t num_tokens, int ranks);
/// Uneven: some ranks have none.
TokenCounts ragged_split(std::int64_t num_tokens, int ranks, std::uint64_t seed);

/// A configuration that plans for every routing of the problem, so that only laws about capacity
/// ever see a plan that is too small.
Config config_of(const MoeProblem& problem, const MoeCase& moe_case, const CallForm& form,
                 std::int64_t max_tokens);

/// The form with weights prepared where the case's are.
CallForm form_of(const MoeCase& moe_case, CallForm form = {}, bool inference = true);

/// The tokens of `rank` and the experts that it owns, packed.
RankCall pack_rank(const MoeProblem& problem, const CallForm& form, const TokenCounts& counts,
                   int rank);

/// A context of `config` on this rank of the case.
Context make_context(const Config& config, const MoeCase& moe_case,
                     std::shared_ptr<Communicator> communicator);

/// Collective: the rows of every rank, one rank after the other.
std::vector<BF16> gather_rows(Communicator& communicator, const std::vector<BF16>& mine,
                              const TokenCounts& counts, std::int64_t width);

/// Creates a context, calls once, returns y of all tokens [T, D].
std::vector<BF16> run(const MoeProblem& problem, const MoeCase& moe_case, const TokenCounts& counts,
                      const CallForm& form = {}, const CallOptions& options = {});
std::vector<BF16> run(const MoeProblem& problem, const MoeCase& moe_case, const CallForm& form = {},
                      const CallOptions& options = {});

}  // namespace distmoe::conformance
