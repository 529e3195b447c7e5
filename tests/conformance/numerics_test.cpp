// SPDX-License-Identifier: Apache-2.0
//
// Invariant: y is the weighted sum of the experts' answers within the tolerance of the suite (see
// moe_oracle.hpp), for both activations, with and without biases, in every layout and type that the
// contract accepts; and how the same values are handed over changes no bit.
#include <gtest/gtest.h>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class Numerics : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, Numerics, testing::ValuesIn(all_cases()), case_name);

constexpr MoeShape kShape{
    .num_tokens = 37, .hidden_dim = 48, .intermediate_dim = 40, .num_experts = 13, .top_k = 4};

MoeProblem clamped(MoeProblem problem) {
  problem.activation = Activation::kSwiGLUClamped;
  problem.limit = 2.0;
  return problem;
}

TEST_P(Numerics, PlainSwigluKeepsToTheTolerance) {
  const MoeProblem problem = make_problem(kShape, RoutePattern::kMixed, 1);
  EXPECT_EQ(first_violation(problem, run(problem, GetParam())), "");
}

TEST_P(Numerics, ClampedSwigluWithBiasesKeepsToTheTolerance) {
  MoeProblem problem = clamped(make_problem(kShape, RoutePattern::kMixed, 2));
  add_biases(problem, 3);
  const TokenCounts counts = ragged_split(kShape.num_tokens, GetParam().ranks, 4);
  EXPECT_EQ(first_violation(problem, run(problem, GetParam(), counts)), "");
}

TEST_P(Numerics, EachBiasIsAppliedAlone) {
  MoeProblem problem = make_problem(kShape, RoutePattern::kDistinct, 5);
  add_biases(problem, 6);
  MoeProblem only13 = problem;
  only13.down_bias.clear();
  EXPECT_EQ(first_violation(only13, run(only13, GetParam())), "");
  MoeProblem only2 = problem;
  only2.gate_bias.clear();
  only2.up_bias.clear();
  EXPECT_EQ(first_violation(only2, run(only2, GetParam())), "");
}

/// Scores and biases that BF16 holds, in every type, layout and stride.
// reports: A30, A31, A33, A34, A37, A117
TEST_P(Numerics, FormsOfTheSameValuesGiveTheSameBits) {
  MoeProblem problem = clamped(make_problem(kShape, RoutePattern::kMixed, 7));
  add_biases(problem, 8);
  problem.round_scores();
  problem.round_biases();
  const TokenCounts counts = ragged_split(kShape.num_tokens, GetParam().ranks, 9);
  const std::vector<BF16> expected = run(problem, GetParam(), counts);
  EXPECT_EQ(first_violation(problem, expected), "");
  // CUDA reads rows 16 bytes at a time.
  const std::int64_t row_step = GetParam().backend == BackendKind::kCpu ? 1 : 8;
  for (const W13Form w13 : {W13Form::kConcatenated, W13Form::kInterleaved, W13Form::kHalves}) {
    for (const bool is_strided : {false, true}) {
      const CallForm form{.id_dtype = is_strided ? DType::kI32 : DType::kI64,
                          .score_dtype = is_strided ? DType::kF32 : DType::kBF16,
                          .bias_dtype = is_strided ? DType::kBF16 : DType::kF32,
                          .w13 = w13,
                          .is_strided = is_strided,
                          .row_step = row_step};
      EXPECT_EQ(first_difference(expected, run(problem, GetParam(), counts, form), 48), "")
          << "w13 form " << static_cast<int>(w13) << (is_strided ? ", strided" : "");
    }
  }
  const CallForm wide{.id_dtype = DType::kI64,
                      .score_dtype = DType::kBF16,
                      .bias_dtype = DType::kBF16,
                      .is_strided = true,
                      .row_step = row_step};
  EXPECT_EQ(first_difference(expected, run(problem, GetParam(), counts, wide), 48), "");
}

// reports: A115, A116, A117: a tolerance that a swapped or wrongly read W13 met would be none.
TEST_P(Numerics, OtherLayoutsOfTheWeightsAreToldApart) {
  const MoeProblem problem = make_problem(kShape, RoutePattern::kDistinct, 10);
  MoeProblem swapped = problem;
  std::swap(swapped.gate, swapped.up);
  const std::vector<BF16> y = run(swapped, GetParam());
  EXPECT_EQ(first_violation(swapped, y), "");
  EXPECT_NE(first_violation(problem, y), "");
}

}  // namespace
}  // namespace distmoe::conformance
