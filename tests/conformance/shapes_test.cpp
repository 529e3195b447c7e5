// SPDX-License-Identifier: Apache-2.0
//
// Invariant: no number of tokens, experts, ranks or columns is special: every legal shape keeps to
// the tolerance, and P ranks give the bits of one.
#include <gtest/gtest.h>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class Shapes : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, Shapes, testing::ValuesIn(some_cases()), case_name);

MoeShape tiny(std::int64_t tokens, std::int64_t experts, std::int64_t top_k) {
  return {.num_tokens = tokens,
          .hidden_dim = 6,
          .intermediate_dim = 5,
          .num_experts = experts,
          .top_k = top_k};
}

void expect_contract(const MoeShape& any_shape, RoutePattern pattern, const MoeCase& moe_case,
                     bool has_biases = false) {
  const MoeShape shape = fit(any_shape, moe_case);
  MoeProblem problem = make_problem(shape, pattern, 100);
  if (has_biases) add_biases(problem, 101);
  const std::vector<BF16> y = run(problem, moe_case);
  SCOPED_TRACE(testing::Message() << "T=" << shape.num_tokens << " D=" << shape.hidden_dim
                                  << " F=" << shape.intermediate_dim << " E=" << shape.num_experts
                                  << " K=" << shape.top_k);
  ASSERT_EQ(first_violation(problem, y), "");
  if (moe_case.ranks == 1) return;
  ASSERT_EQ(first_difference(run(problem, single_rank_of(moe_case)), y, shape.hidden_dim), "");
}

// reports: A53, models need K = 10, 16 and 22.
TEST_P(Shapes, EveryTopK) {
  for (const std::int64_t top_k : {1, 2, 8, 9, 10, 16, 22, 32}) {
    for (const RoutePattern pattern : {RoutePattern::kDistinct, RoutePattern::kMixed}) {
      ASSERT_NO_FATAL_FAILURE(expect_contract(tiny(19, 512, top_k), pattern, GetParam()));
    }
  }
}

// reports: A53, A32: every token names every expert.
TEST_P(Shapes, TopKMayEqualTheNumberOfExperts) {
  for (const std::int64_t experts : {1, 2, 3, 7, 8, 33}) {
    ASSERT_NO_FATAL_FAILURE(
        expect_contract(tiny(21, experts, experts), RoutePattern::kDistinct, GetParam()));
  }
}

// reports: A54, A55 (more experts than tokens)
TEST_P(Shapes, EveryNumberOfExperts) {
  for (const std::int64_t experts :
       {1, 3, 5, 6, 60, 65, 128, 160, 257, 384, 512, 896, 1025, 2048}) {
    const std::int64_t top_k = std::min<std::int64_t>(experts, 5);
    ASSERT_NO_FATAL_FAILURE(
        expect_contract(tiny(13, experts, top_k), RoutePattern::kDistinct, GetParam()));
  }
}

// reports: A35, A46, A47, A48: columns of every size, odd ones and those of models.
TEST_P(Shapes, EveryHiddenDim) {
  for (const std::int64_t hidden :
       {1, 2, 3, 7, 8, 33, 63, 64, 65, 192, 576, 1024, 1025, 1536, 2880, 3072, 3584, 6144}) {
    MoeShape shape = tiny(5, 4, 2);
    shape.hidden_dim = hidden;
    ASSERT_NO_FATAL_FAILURE(expect_contract(shape, RoutePattern::kDistinct, GetParam()));
  }
}

// reports: A44, A46, A47, A49
TEST_P(Shapes, EveryIntermediateDim) {
  for (const std::int64_t inner : {1,   2,   3,   7,   16,  33,  48,  63,  65,   80,  176,
                                   192, 257, 320, 352, 464, 513, 704, 768, 1856, 2880}) {
    MoeShape shape = tiny(5, 4, 2);
    shape.intermediate_dim = inner;
    ASSERT_NO_FATAL_FAILURE(expect_contract(shape, RoutePattern::kDistinct, GetParam()));
  }
}

// reports: A32, A40, A41: every number of tokens around the tiles, then the reported ones.
TEST_P(Shapes, EveryNumberOfTokens) {
  for (std::int64_t tokens = 0; tokens <= 130; ++tokens) {
    ASSERT_NO_FATAL_FAILURE(expect_contract(tiny(tokens, 8, 3), RoutePattern::kMixed, GetParam()));
  }
  for (const std::int64_t tokens : {672, 4095}) {
    ASSERT_NO_FATAL_FAILURE(expect_contract(tiny(tokens, 8, 3), RoutePattern::kMixed, GetParam()));
  }
}

/// All rows at one expert: the products change their form at 16 rows and are cut at 512.
// reports: A14
TEST_P(Shapes, RowsOfOneExpertCrossEveryBlock) {
  for (const std::int64_t rows : {1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 511, 512, 513, 1025}) {
    MoeShape shape = tiny(rows, 3, 1);
    shape.hidden_dim = 34;
    ASSERT_NO_FATAL_FAILURE(expect_contract(shape, RoutePattern::kOneExpert, GetParam()));
  }
}

/// The same at a width that takes several column slabs (256 gate and up, 256 down), each with its
/// own part of the biases.
TEST_P(Shapes, RowsAndColumnsCrossEveryBlockTogether) {
  for (const std::int64_t rows : {16, 17, 513}) {
    const MoeShape shape{.num_tokens = rows,
                         .hidden_dim = 523,
                         .intermediate_dim = 261,
                         .num_experts = 2,
                         .top_k = 1};
    ASSERT_NO_FATAL_FAILURE(expect_contract(shape, RoutePattern::kOneExpert, GetParam(), true));
  }
}

// reports: A54: the branch for more than 65535 routes.
TEST_P(Shapes, MoreRoutesThan16BitsCount) {
  MoeShape shape = tiny(8300, 256, 8);
  shape.hidden_dim = 3;
  shape.intermediate_dim = 2;
  ASSERT_NO_FATAL_FAILURE(expect_contract(shape, RoutePattern::kDistinct, GetParam()));
}

// reports: A10: every pattern of empty and busy experts.
TEST_P(Shapes, EveryPatternOfExpertsWithoutRows) {
  MoeProblem problem = make_problem(fit(tiny(16, 4, 1), GetParam()), RoutePattern::kDistinct, 4);
  for (std::uint64_t pattern = 0; pattern < 16; ++pattern) {
    std::vector<std::int64_t> busy;
    for (std::int64_t expert = 0; expert < 4; ++expert) {
      if ((pattern >> expert) % 2 == 1) busy.push_back(expert);
    }
    for (std::size_t token = 0; token < 16; ++token) {
      problem.ids[token] = busy.empty() ? -1 : busy[token % busy.size()];
    }
    ASSERT_EQ(first_violation(problem, run(problem, GetParam())), "") << "pattern " << pattern;
  }
}

}  // namespace
}  // namespace distmoe::conformance
