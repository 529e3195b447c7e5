// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a disabled route adds nothing, whatever it holds; a repeated expert counts as often as
// it is named; a NaN poisons the output row of its own token and no other bit; infinities and zeros
// follow IEEE 754.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class SpecialValues : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, SpecialValues, testing::ValuesIn(combine_cases()), case_name);

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr MoeShape kShape{
    .num_tokens = 23, .hidden_dim = 40, .intermediate_dim = 24, .num_experts = 9, .top_k = 4};
constexpr auto kWidth = static_cast<std::size_t>(kShape.hidden_dim);
constexpr auto kTopK = static_cast<std::size_t>(kShape.top_k);

bool row_is(const std::vector<BF16>& y, std::size_t token, bool (*holds)(float)) {
  for (std::size_t d = 0; d < kWidth; ++d) {
    if (!holds(to_float(y[token * kWidth + d]))) return false;
  }
  return true;
}
bool is_nan(float value) { return std::isnan(value); }
bool is_plus_zero(float value) { return value == 0 && !std::signbit(value); }

/// Expects that y differs from `expected` in row `token` alone, which is NaN throughout.
void expect_only_row_is_nan(std::vector<BF16> expected, const std::vector<BF16>& y,
                            std::size_t token) {
  ASSERT_EQ(y.size(), expected.size());
  EXPECT_TRUE(row_is(y, token, is_nan)) << "token " << token;
  for (std::size_t d = 0; d < kWidth; ++d) expected[token * kWidth + d] = y[token * kWidth + d];
  EXPECT_EQ(first_difference(expected, y, kShape.hidden_dim), "") << "poisoned token " << token;
}

// reports: A24, A25: neither the last expert nor an unwritten row enters, and a NaN score is
// ignored.
TEST_P(SpecialValues, DisabledRoutesAddNothingWhateverTheirScore) {
  MoeProblem problem = make_problem(kShape, RoutePattern::kDistinct, 50);
  for (std::size_t token = 0; token < 23; ++token) problem.ids[token * kTopK + token % kTopK] = -1;
  const std::vector<BF16> expected = run(problem, GetParam());
  EXPECT_EQ(first_violation(problem, expected), "");
  for (const float score : {0.0f, kNaN, kInf, -kInf, 1e30f}) {
    for (std::size_t token = 0; token < 23; ++token) {
      problem.scores[token * kTopK + token % kTopK] = score;
    }
    EXPECT_EQ(first_difference(expected, run(problem, GetParam()), kShape.hidden_dim), "") << score;
  }
}

// reports: A27
TEST_P(SpecialValues, TokensWithoutRoutesAreExactlyZero) {
  MoeProblem problem = make_problem(kShape, RoutePattern::kAllDisabled, 51);
  for (float& score : problem.scores) score = kNaN;
  const std::vector<BF16> y = run(problem, GetParam());
  for (std::size_t token = 0; token < 23; ++token) EXPECT_TRUE(row_is(y, token, is_plus_zero));
}

// reports: A19, A20
TEST_P(SpecialValues, ARepeatedExpertCountsAsOftenAsItIsNamed) {
  MoeProblem problem = make_problem(kShape, RoutePattern::kDistinct, 52);
  for (std::size_t token = 0; token < 23; ++token) {
    for (std::size_t k = 1; k < kTopK; ++k) {
      problem.ids[token * kTopK + k] = problem.ids[token * kTopK + (k - 1) / 2];
    }
  }
  EXPECT_EQ(first_violation(problem, run(problem, GetParam())), "");
}

// reports: A63, A13, A58: padding of graphs brings NaN rows.
TEST_P(SpecialValues, ANaNTokenPoisonsItsOwnRowAlone) {
  const MoeProblem clean = make_problem(kShape, RoutePattern::kDistinct, 53);
  const std::vector<BF16> expected = run(clean, GetParam());
  for (const std::size_t token : {0u, 11u, 22u}) {
    MoeProblem problem = clean;
    std::fill_n(problem.x_row(static_cast<std::int64_t>(token)), kWidth, to_bf16(kNaN));
    expect_only_row_is_nan(expected, run(problem, GetParam()), token);
  }
}

TEST_P(SpecialValues, ANaNElementReachesEveryColumnOfItsRow) {
  const MoeProblem clean = make_problem(kShape, RoutePattern::kDistinct, 54);
  const std::vector<BF16> expected = run(clean, GetParam());
  for (const Activation activation : {Activation::kSwiGLU, Activation::kSwiGLUClamped}) {
    MoeProblem problem = clean;
    problem.x_row(7)[3] = to_bf16(kNaN);
    problem.activation = activation;
    MoeProblem clean_too = clean;
    clean_too.activation = activation;
    expect_only_row_is_nan(run(clean_too, GetParam()), run(problem, GetParam()), 7);
  }
}

// A NaN score of a live route belongs to its token.
TEST_P(SpecialValues, ANaNScorePoisonsItsOwnRowAlone) {
  MoeProblem problem = make_problem(kShape, RoutePattern::kDistinct, 55);
  const std::vector<BF16> expected = run(problem, GetParam());
  problem.scores[9 * kTopK + 2] = kNaN;
  expect_only_row_is_nan(expected, run(problem, GetParam()), 9);
}

TEST_P(SpecialValues, AZeroScoreLeavesTheOtherRoutes) {
  MoeProblem problem = make_problem(kShape, RoutePattern::kDistinct, 56);
  for (std::size_t token = 0; token < 23; ++token) problem.scores[token * kTopK + 1] = 0.0f;
  const std::vector<BF16> zero = run(problem, GetParam());
  EXPECT_EQ(first_violation(problem, zero), "");
  // Live: 0 * NaN is NaN. Disabled: nothing. The two are told apart.
  MoeProblem poisoned = problem;
  std::fill_n(poisoned.x_row(4), kWidth, to_bf16(kNaN));
  for (std::size_t k = 0; k < kTopK; ++k) poisoned.scores[4 * kTopK + k] = 0.0f;
  expect_only_row_is_nan(zero, run(poisoned, GetParam()), 4);
}

/// An expert whose weights are NaN poisons the tokens that name it and no others.
// reports: A60
TEST_P(SpecialValues, NaNWeightsReachTheirExpertsTokensAlone) {
  MoeProblem problem = make_problem(kShape, RoutePattern::kMixed, 57);
  const std::vector<BF16> expected = run(problem, GetParam());
  const std::int64_t sick = 5;
  const auto matrix = static_cast<std::size_t>(kShape.intermediate_dim * kShape.hidden_dim);
  std::fill_n(problem.down.begin() + static_cast<std::ptrdiff_t>(sick * matrix), matrix,
              to_bf16(kNaN));
  const std::vector<BF16> y = run(problem, GetParam());
  std::vector<BF16> with_nan = expected;
  int num_sick = 0;
  for (std::size_t token = 0; token < 23; ++token) {
    const auto ids = problem.ids.begin() + static_cast<std::ptrdiff_t>(token * kTopK);
    if (std::find(ids, ids + kShape.top_k, sick) == ids + kShape.top_k) continue;
    ++num_sick;
    EXPECT_TRUE(row_is(y, token, is_nan)) << token;
    std::copy_n(y.begin() + static_cast<std::ptrdiff_t>(token * kWidth), kWidth,
                with_nan.begin() + static_cast<std::ptrdiff_t>(token * kWidth));
  }
  EXPECT_GT(num_sick, 0);
  EXPECT_EQ(first_difference(with_nan, y, kShape.hidden_dim), "");
}

/// Far gates: s(z) is 0 or 1, no NaN appears, and large values become what BF16 makes of them.
// reports: A64: 1e5 before the score is no overflow in BF16.
TEST_P(SpecialValues, LargeValuesStayFinite) {
  const MoeShape shape =
      fit({.num_tokens = 5, .hidden_dim = 1, .intermediate_dim = 1, .num_experts = 3, .top_k = 1},
          GetParam());
  MoeProblem problem = make_constant_problem(shape, 100.0, 1000.0, 1.0);
  std::ranges::fill(problem.scores, 0.1f);
  for (const BF16 value : run(problem, GetParam())) {
    EXPECT_NEAR(to_float(value), 1e4, 1e4 / 128);
  }
  const MoeProblem far_below = make_constant_problem(shape, -300.0, 1e30, 1.0);
  for (const BF16 value : run(far_below, GetParam())) EXPECT_EQ(to_float(value), 0.0f);
  const MoeProblem too_large = make_constant_problem(shape, 1e20, 1e20, 1.0);
  for (const BF16 value : run(too_large, GetParam())) EXPECT_EQ(to_float(value), kInf);
}

}  // namespace
}  // namespace distmoe::conformance
