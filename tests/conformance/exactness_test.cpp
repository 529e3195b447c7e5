// SPDX-License-Identifier: Apache-2.0
//
// Invariant: rows reach their experts and their tokens unchanged, and the combine takes its
// products and sums in the order of the contract, each rounded once: where h3 is exact, every case
// gives the bits of a plain loop, per_route over k and per_rank over the sums of the ranks.
#include <gtest/gtest.h>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class Exactness : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, Exactness, testing::ValuesIn(all_cases()), case_name);

constexpr MoeShape kShape{
    .num_tokens = 150, .hidden_dim = 136, .intermediate_dim = 48, .num_experts = 14, .top_k = 6};

/// The last route of a token takes back what the first one, a large one, brought: what is left
/// shows in which order the others were added between them.
MoeProblem make_telling_problem(RoutePattern pattern, std::uint64_t seed) {
  MoeProblem problem = make_exact_problem(kShape, pattern, seed);
  const auto top_k = static_cast<std::size_t>(kShape.top_k);
  for (std::size_t first = 0; first < problem.ids.size(); first += top_k) {
    problem.ids[first + top_k - 1] = problem.ids[first];
    problem.scores[first] *= 0x1p18f;
    problem.scores[first + top_k - 1] = -problem.scores[first];
  }
  return problem;
}

std::vector<BF16> expected_of(const MoeProblem& problem, const MoeCase& moe_case) {
  return plain_of(problem, moe_case.combine == Combine::kPerRank ? moe_case.ranks : 1);
}

TEST_P(Exactness, TheCombineHasTheBitsOfAPlainLoop) {
  for (const RoutePattern pattern : {RoutePattern::kDistinct, RoutePattern::kMixed}) {
    const MoeProblem problem = make_telling_problem(pattern, 200);
    const std::vector<BF16> expected = expected_of(problem, GetParam());
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      const TokenCounts counts = ragged_split(kShape.num_tokens, GetParam().ranks, seed);
      ASSERT_EQ(first_difference(expected, run(problem, GetParam(), counts), kShape.hidden_dim), "")
          << "split " << seed;
    }
  }
}

TEST_P(Exactness, OneExpertAndNoExpertToo) {
  for (const RoutePattern pattern : {RoutePattern::kOneExpert, RoutePattern::kAllDisabled}) {
    const MoeProblem problem = make_telling_problem(pattern, 201);
    EXPECT_EQ(first_difference(expected_of(problem, GetParam()), run(problem, GetParam()),
                               kShape.hidden_dim),
              "");
  }
}

TEST_P(Exactness, ScoresOfBF16AreWidened) {
  MoeProblem problem = make_telling_problem(RoutePattern::kMixed, 202);
  problem.round_scores();
  const CallForm form{.id_dtype = DType::kI64, .score_dtype = DType::kBF16};
  EXPECT_EQ(first_difference(expected_of(problem, GetParam()), run(problem, GetParam(), form),
                             kShape.hidden_dim),
            "");
}

/// The two orders of a sum are told apart, so that the laws above can fail.
TEST(ExactnessOfTheSuite, PerRankHasOtherBits) {
  const MoeProblem problem = make_telling_problem(RoutePattern::kDistinct, 200);
  EXPECT_NE(first_difference(plain_of(problem), plain_of(problem, 3), kShape.hidden_dim), "");
  EXPECT_NE(first_difference(plain_of(problem, 2), plain_of(problem, 3), kShape.hidden_dim), "");
}

}  // namespace
}  // namespace distmoe::conformance
