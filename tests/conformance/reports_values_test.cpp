// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the right values of reported failures of combine precision, score handling, the order
// of gate and up, clamping, biases and NaN padding. Each number was computed by hand from the
// formulas; results are BF16, hence a relative tolerance of 2^-8.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class ReportedValues : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Reports, ReportedValues, testing::ValuesIn(combine_cases()), case_name);

double silu(double z) { return z / (1 + std::exp(-z)); }

void expect_all(const std::vector<BF16>& y, double value) {
  ASSERT_FALSE(y.empty());
  for (const BF16 element : y) {
    EXPECT_NEAR(to_float(element), value, std::abs(value) * 0x1p-8);
  }
}

/// One token a rank, D and F as narrow as the backend takes them.
MoeShape unit_shape(const MoeCase& moe_case, std::int64_t experts, std::int64_t top_k) {
  return fit({.num_tokens = moe_case.ranks,
              .hidden_dim = 1,
              .intermediate_dim = 1,
              .num_experts = experts,
              .top_k = top_k},
             moe_case);
}

/// Experts whose answer is 1 whatever comes in: W = 0, bias2 = 1.
MoeProblem unit_experts(const MoeCase& moe_case, std::int64_t experts, std::int64_t top_k) {
  const MoeShape shape = unit_shape(moe_case, experts, top_k);
  MoeProblem problem = make_constant_problem(shape, 0, 0, 0);
  problem.down_bias.assign(static_cast<std::size_t>(experts * shape.hidden_dim), 1.0f);
  for (std::size_t route = 0; route < problem.ids.size(); ++route) {
    problem.ids[route] = static_cast<std::int64_t>(route) % top_k;
  }
  return problem;
}

void set_scores(MoeProblem& problem, std::initializer_list<float> scores) {
  for (std::size_t route = 0; route < problem.scores.size(); ++route) {
    problem.scores[route] = *(scores.begin() + route % scores.size());
  }
}

// reports: A105: the score multiplies after W2; on the input it would give 0.155615.
TEST_P(ReportedValues, TheScoreMultipliesAfterW2) {
  MoeProblem problem = make_constant_problem(unit_shape(GetParam(), 3, 1), 1, 1, 1);
  set_scores(problem, {0.5f});
  expect_all(run(problem, GetParam()), 0.365529);
}

// reports: A115, A116: gate first; swapped it would give -0.537883.
TEST_P(ReportedValues, GateComesBeforeUp) {
  const MoeProblem problem = make_constant_problem(unit_shape(GetParam(), 3, 1), 2, -1, 1);
  expect_all(run(problem, GetParam()), -1.761594);
  expect_all(run(problem, GetParam(), {.w13 = W13Form::kInterleaved}), -1.761594);
  expect_all(run(problem, GetParam(), {.w13 = W13Form::kHalves}), -1.761594);
  const MoeProblem swapped = make_constant_problem(unit_shape(GetParam(), 3, 1), -1, 2, 1);
  expect_all(run(swapped, GetParam()), -0.537883);
}

// reports: A117: rows g0 g1 u0 u1 read as g0 u0 g1 u1 are another layer.
TEST_P(ReportedValues, TheWrongLayoutFlagGivesAnotherResult) {
  const MoeShape shape =
      fit({.num_tokens = 6, .hidden_dim = 5, .intermediate_dim = 4, .num_experts = 3, .top_k = 2},
          GetParam());
  const MoeProblem problem = make_problem(shape, RoutePattern::kDistinct, 130);
  const TokenCounts counts = even_split(6, GetParam().ranks);
  Config config = config_of(problem, GetParam(), {}, 6);
  config.gate_up_layout = GateUpLayout::kInterleaved;  // the weights are concatenated
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(config, GetParam(), communicator);
    const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
    call_experts(context, call);
    const auto y = gather_rows(*communicator, call.y_rows(), counts, shape.hidden_dim);
    EXPECT_NE(first_violation(problem, y), "");
  });
}

// reports: A117, A119: the gate is bounded from above only; two-sided it would give -0.154.
TEST_P(ReportedValues, TheClampBoundsTheGateFromAboveAndUpOnBothSides) {
  const auto clamped = [&](double gate, double up) {
    MoeProblem problem = make_constant_problem(unit_shape(GetParam(), 3, 1), gate, up, 1);
    problem.activation = Activation::kSwiGLUClamped;
    problem.limit = 1.0;
    return run(problem, GetParam());
  };
  const auto gated = [](double gate) { return gate / (1 + std::exp(-1.702 * gate)); };
  expect_all(clamped(-3, 0), gated(-3));
  expect_all(clamped(3, 0), gated(1));
  expect_all(clamped(0.5, 5), gated(0.5) * 2);
  expect_all(clamped(0.5, -0.5), gated(0.5) * 0.5);
  expect_all(clamped(0.5, -5), 0.0);
}

// reports: A122: bias2 is weighted by the score: 1.0 and 0.5; unweighted gives 2.0.
TEST_P(ReportedValues, Bias2IsWeightedByTheScore) {
  MoeProblem problem = unit_experts(GetParam(), 3, 2);
  set_scores(problem, {0.7f, 0.3f});
  expect_all(run(problem, GetParam()), 1.0);
  set_scores(problem, {0.2f, 0.3f});
  expect_all(run(problem, GetParam()), 0.5);
}

// reports: A110, A52: scores of a full softmax over logits 2, 1, 0, -1 are used unchanged.
TEST_P(ReportedValues, ScoresAreNotRenormalised) {
  MoeProblem problem = unit_experts(GetParam(), 4, 2);
  set_scores(problem, {0.643914f, 0.236883f});
  expect_all(run(problem, GetParam()), 0.880797);
  MoeProblem single = unit_experts(GetParam(), 4, 1);
  set_scores(single, {0.3f});
  expect_all(run(single, GetParam()), 0.3);
}

// reports: A51: K = 1 keeps one score a token.
TEST_P(ReportedValues, ASingleScoreBelongsToItsToken) {
  const MoeShape shape =
      fit({.num_tokens = 3, .hidden_dim = 1, .intermediate_dim = 1, .num_experts = 3, .top_k = 1},
          GetParam());
  MoeProblem problem = make_constant_problem(shape, 1, 1, 1);
  problem.scores = {0.2f, 0.5f, 0.9f};
  const std::vector<BF16> y = run(problem, GetParam());
  for (std::size_t token = 0; token < 3; ++token) {
    const double expected = problem.scores[token] * silu(1);
    const std::size_t at = token * static_cast<std::size_t>(shape.hidden_dim);
    EXPECT_NEAR(to_float(y[at]), expected, expected * 0x1p-8) << token;
  }
}

// reports: A104, A71: FP32 sums: 256 + 1 + 1 is 258, where a BF16 sum would stay at 256; and 500 is
// not cut at 448.
TEST_P(ReportedValues, TheCombineSumsInFP32) {
  MoeProblem problem = unit_experts(GetParam(), 3, 3);
  set_scores(problem, {256.0f, 1.0f, 1.0f});
  for (const BF16 y : run(problem, GetParam())) EXPECT_EQ(to_float(y), 258.0f);
  set_scores(problem, {500.0f, 0.0f, 0.0f});
  for (const BF16 y : run(problem, GetParam())) EXPECT_EQ(to_float(y), 500.0f);
}

/// 2^24 + 1 is 2^24 in FP32: only the order of k gives 0, 1 and 0.
TEST_P(ReportedValues, TheCombineSumsInTheOrderOfK) {
  if (GetParam().combine == Combine::kPerRank) GTEST_SKIP() << "per_rank sums by rank first";
  constexpr float kLarge = 16777216.0f;
  MoeProblem problem = unit_experts(GetParam(), 3, 3);
  set_scores(problem, {kLarge, 1.0f, -kLarge});
  for (const BF16 y : run(problem, GetParam())) EXPECT_EQ(to_float(y), 0.0f);
  set_scores(problem, {kLarge, -kLarge, 1.0f});
  for (const BF16 y : run(problem, GetParam())) EXPECT_EQ(to_float(y), 1.0f);
  set_scores(problem, {1.0f, kLarge, -kLarge});
  for (const BF16 y : run(problem, GetParam())) EXPECT_EQ(to_float(y), 0.0f);
}

// reports: A106: every (token, k) has its own score: sums of 2^-(3t+k) tell which were used.
TEST_P(ReportedValues, EveryRouteHasItsOwnScore) {
  MoeProblem problem = unit_experts(GetParam(), 4, 3);
  for (std::size_t route = 0; route < problem.scores.size(); ++route) {
    problem.scores[route] = static_cast<float>(std::exp2(-static_cast<double>(route)));
  }
  const std::vector<BF16> y = run(problem, GetParam());
  const auto width = static_cast<std::size_t>(problem.shape.hidden_dim);
  for (std::size_t token = 0; token < y.size() / width; ++token) {
    EXPECT_EQ(to_float(y[token * width]),
              static_cast<float>(1.75 * std::exp2(-3.0 * static_cast<double>(token))));
  }
}

// reports: A58, A85, A13: rows left by an earlier call, NaN or huge, are never read again.
TEST_P(ReportedValues, WhatAnEarlierCallLeftBehindIsNeverRead) {
  const MoeShape shape =
      fit({.num_tokens = 64, .hidden_dim = 12, .intermediate_dim = 8, .num_experts = 5, .top_k = 3},
          GetParam());
  MoeProblem large = make_problem(shape, RoutePattern::kDistinct, 131);
  MoeProblem small = large;
  small.shape.num_tokens = 8;
  const std::vector<BF16> expected = run(small, GetParam());
  const TokenCounts large_counts = even_split(64, GetParam().ranks);
  const TokenCounts small_counts = ragged_split(8, GetParam().ranks, 2);
  const Config config = config_of(large, GetParam(), {}, 64);
  for (const float left : {0.0f, 1e30f, std::numeric_limits<float>::quiet_NaN(),
                           std::numeric_limits<float>::infinity()}) {
    std::fill(large.x.begin(), large.x.end(), to_bf16(left));
    run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
      Context context = make_context(config, GetParam(), communicator);
      const RankCall first = pack_rank(large, {}, large_counts, communicator->rank());
      call_experts(context, first);
      const RankCall second = pack_rank(small, {}, small_counts, communicator->rank());
      call_experts(context, second);
      const auto y = gather_rows(*communicator, second.y_rows(), small_counts, shape.hidden_dim);
      EXPECT_EQ(first_difference(expected, y, shape.hidden_dim), "") << "left behind: " << left;
    });
  }
}

// reports: A104: nothing below BF16 is chosen unasked.
TEST(ReportedDefaults, PrecisionAndCombineAreExact) {
  EXPECT_EQ(Config{}.precision, Precision::kBF16);
  EXPECT_EQ(Config{}.combine, Combine::kPerRoute);
}

}  // namespace
}  // namespace distmoe::conformance
