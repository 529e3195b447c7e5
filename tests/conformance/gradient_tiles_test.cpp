// SPDX-License-Identifier: Apache-2.0
//
// Invariant: gradients keep to the numerics contract whatever their sizes are beside the tiles that
// a backend cuts: more rows and columns than a tile has, every number of tokens, and widths that no
// tile divides.
#include <gtest/gtest.h>

#include "conformance/moe_gradients.hpp"

namespace distmoe::conformance {
namespace {

constexpr double kRounding = 1e-3;  // of sums in FP32; one missing rounding to BF16 gives 1.6e-3

class GradientTiles : public testing::TestWithParam<MoeCase> {};
INSTANTIATE_TEST_SUITE_P(Laws, GradientTiles,
                         testing::Values(MoeCase{.ranks = 1, .num_threads = 2},
                                         MoeCase{.ranks = 3, .num_threads = 1}),
                         case_name);

/// Of both policies, biases included where the problem has them.
void expect_right(const MoeProblem& problem, const MoeCase& moe_case, std::uint64_t seed) {
  SCOPED_TRACE("T = " + std::to_string(problem.shape.num_tokens) +
               ", D = " + std::to_string(problem.shape.hidden_dim) +
               ", F = " + std::to_string(problem.shape.intermediate_dim));
  const std::vector<BF16> dy = make_dy(problem, seed);
  for (const ActivationPolicy policy : {ActivationPolicy::kFull, ActivationPolicy::kLean}) {
    const bool is_lean = policy == ActivationPolicy::kLean;
    const GradientOracle oracle = gradient_oracle(problem, dy, Rounding::kContract, is_lean);
    // Lean saves, so that both ways to h1 are taken.
    const BackwardForm form{.policy = policy,
                            .slot_factor = is_lean ? std::optional(4.0) : std::nullopt};
    EXPECT_EQ(
        first_violation(problem, run_backward(problem, dy, moe_case, form), oracle, kRounding), "");
  }
}

void expect_right(const MoeShape& shape, const MoeCase& moe_case, std::uint64_t seed) {
  MoeProblem problem = make_problem_with_biases(shape, RoutePattern::kDistinct, seed);
  expect_right(problem, moe_case, seed + 2);
}

/// On the CPU grad_x is summed by 1024 columns, biases by 512, WGRAD tiles are 256 x 512, DGRAD
/// slabs 256, and all have a rest here.
// reports: A46, A47, A48
TEST_P(GradientTiles, OfWidthsBeyondEveryTileKeepToTheContract) {
  expect_right(
      {.num_tokens = 3, .hidden_dim = 1100, .intermediate_dim = 600, .num_experts = 2, .top_k = 2},
      GetParam(), 700);
}

TEST_P(GradientTiles, OfInterleavedWeightsBeyondEveryTileHaveTheSameBits) {
  const MoeProblem problem = make_problem_with_biases(
      {.num_tokens = 3, .hidden_dim = 24, .intermediate_dim = 600, .num_experts = 2, .top_k = 2},
      RoutePattern::kDistinct, 702);
  const std::vector<BF16> dy = make_dy(problem, 704);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    BackwardForm form{.wgrad_dtype = dtype};
    const GradientValues expected = run_backward(problem, dy, GetParam(), form);
    form.call.w13 = W13Form::kInterleaved;
    EXPECT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), form)), "");
  }
}

/// Blocks of products have 512 rows; FP32 operands of WGRAD come 128 rows at a time.
TEST_P(GradientTiles, OfMoreRowsThanABlockKeepToTheContract) {
  MoeProblem problem = make_problem_with_biases(
      {.num_tokens = 700, .hidden_dim = 24, .intermediate_dim = 20, .num_experts = 3, .top_k = 2},
      RoutePattern::kOneExpert, 703);
  expect_right(problem, GetParam(), 705);
}

// reports: A08: the counts of the report.
TEST_P(GradientTiles, Of2577RowsBetweenExpertsWithoutRowsKeepToTheContract) {
  const std::vector<std::size_t> rows{162, 0, 2577, 446, 0, 83};
  std::vector<std::int64_t> ids;
  for (std::size_t expert = 0; expert < rows.size(); ++expert) {
    ids.insert(ids.end(), rows[expert], static_cast<std::int64_t>(expert));
  }
  MoeProblem problem = make_problem_with_biases({.num_tokens = std::ssize(ids),
                                                 .hidden_dim = 16,
                                                 .intermediate_dim = 12,
                                                 .num_experts = std::ssize(rows),
                                                 .top_k = 1},
                                                RoutePattern::kDistinct, 706);
  problem.ids = ids;
  expect_right(problem, GetParam(), 708);
}

// reports: A32, A39, A41
TEST_P(GradientTiles, OfEveryNumberOfTokensKeepToTheContract) {
  std::vector<std::int64_t> numbers{672, 4095};
  for (std::int64_t tokens = 1; tokens <= 130; ++tokens) numbers.push_back(tokens);
  for (const std::int64_t tokens : numbers) {
    expect_right({.num_tokens = tokens,
                  .hidden_dim = 8,
                  .intermediate_dim = 6,
                  .num_experts = 8,
                  .top_k = 3},
                 GetParam(), static_cast<std::uint64_t>(710 + tokens));
  }
}

// reports: A44, A46
TEST_P(GradientTiles, OfEveryIntermediateDimKeepToTheContract) {
  for (const std::int64_t inner : {16, 48, 80, 176, 192, 320, 352, 464, 704, 768, 1856, 2880}) {
    expect_right({.num_tokens = 4,
                  .hidden_dim = 24,
                  .intermediate_dim = inner,
                  .num_experts = 2,
                  .top_k = 1},
                 GetParam(), 720);
  }
}

// reports: A46, A47, A48
TEST_P(GradientTiles, OfEveryHiddenDimKeepToTheContract) {
  for (const std::int64_t width : {64, 576, 1024, 1025, 1536, 2880, 3072, 3584, 6144}) {
    expect_right({.num_tokens = 4,
                  .hidden_dim = width,
                  .intermediate_dim = 20,
                  .num_experts = 2,
                  .top_k = 1},
                 GetParam(), 730);
  }
}

}  // namespace
}  // namespace distmoe::conformance
