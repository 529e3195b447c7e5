// SPDX-License-Identifier: Apache-2.0
//
// Invariant: gradients of MXFP8 are products of the codes of the numerics contract, rows quantised
// along themselves for DGRAD and across themselves for WGRAD; prepared weights, pipelines, layouts
// and what the forward kept change no bit.
#include <gtest/gtest.h>

#include <algorithm>

#include "conformance/coded_oracle.hpp"
#include "conformance/moe_gradients.hpp"

namespace distmoe::conformance {
namespace {

class CodedGradients : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, CodedGradients, testing::ValuesIn(coded_training_cases()),
                         case_name);

MoeProblem problem_of(std::uint64_t seed, RoutePattern pattern = RoutePattern::kMixed) {
  // Experts of 44 rows and less: partial blocks of 32.
  MoeProblem problem = make_problem(
      {.num_tokens = 61, .hidden_dim = 96, .intermediate_dim = 64, .num_experts = 5, .top_k = 3},
      pattern, seed);
  add_biases(problem, seed + 1);
  return problem;
}

// reports: A39, A40
TEST_P(CodedGradients, AreProductsOfTheDecodedOperands) {
  for (const Activation activation : {Activation::kSwiGLU, Activation::kSwiGLUClamped}) {
    MoeProblem problem = problem_of(700);
    problem.activation = activation;
    problem.limit = 0.7;
    for (const bool is_spread : {false, true}) {
      if (is_spread) spread_magnitudes(problem);
      const std::vector<BF16> dy = is_spread ? make_spread_dy(problem, 702) : make_dy(problem, 702);
      const GradientOracle oracle = coded_gradients(problem, dy);
      EXPECT_EQ(first_violation(problem, run_backward(problem, dy, GetParam()), oracle, 6e-3), "")
          << is_spread;
    }
  }
}

/// More rows of an expert than one product of codes takes, and widths of more than a slab.
TEST_P(CodedGradients, SumOverBlocksOfRows) {
  if (GetParam().ranks > 2) GTEST_SKIP() << "one and two ranks say it";
  MoeProblem problem = make_problem(
      {.num_tokens = 530, .hidden_dim = 64, .intermediate_dim = 288, .num_experts = 2, .top_k = 1},
      RoutePattern::kOneExpert, 705);
  const std::vector<BF16> dy = make_dy(problem, 706);
  EXPECT_EQ(first_violation(problem, run_backward(problem, dy, GetParam()),
                            coded_gradients(problem, dy), 6e-3),
            "");
}

TEST_P(CodedGradients, WhatIsKeptPreparedWeightsPipelinesAndLayoutsChangeNoBit) {
  MoeProblem problem = problem_of(710);
  spread_magnitudes(problem);
  const std::vector<BF16> dy = make_spread_dy(problem, 711);
  const GradientValues expected = run_backward(problem, dy, GetParam());
  for (const std::optional<double> factor :
       {std::optional<double>(), std::optional(1.0 * GetParam().ranks)}) {
    for (const Pipeline pipeline : {Pipeline::kStaged, Pipeline::kMega}) {
      for (const bool is_prepared : {false, true}) {
        for (const W13Form w13 :
             {W13Form::kConcatenated, W13Form::kInterleaved, W13Form::kHalves}) {
          MoeCase moe_case = GetParam();
          moe_case.pipeline = pipeline;
          moe_case.is_prepared = is_prepared;
          const BackwardForm form{.call = {.w13 = w13, .is_strided = is_prepared},
                                  .slot_factor = factor};
          EXPECT_EQ(first_difference(expected, run_backward(problem, dy, moe_case, form)), "")
              << name_of(moe_case) << (factor ? ", saved" : ", recomputed");
        }
      }
    }
  }
}

TEST_P(CodedGradients, AreProductsOfTheDecodedOperandsWithANormToo) {
  MoeProblem problem = problem_of(715);
  for (const bool is_spread : {false, true}) {
    if (is_spread) spread_magnitudes(problem);
    const std::vector<BF16> dy = is_spread ? make_spread_dy(problem, 716) : make_dy(problem, 716);
    for (const double eps : {1e-5, 0.5}) {
      const BackwardForm form{.options = {.norm = PostExpertNorm{.eps = eps}}};
      EXPECT_EQ(first_violation(problem, run_backward(problem, dy, GetParam(), form),
                                coded_gradients(problem, dy, {.eps = eps}), 6e-3),
                "")
          << is_spread << ", eps " << eps;
    }
  }
}

/// With a norm h3 of a saved layer is computed again, from codes that are made again.
TEST_P(CodedGradients, WithANormDoNotDependOnWhatIsKept) {
  MoeProblem problem = problem_of(720);
  spread_magnitudes(problem);
  const std::vector<BF16> dy = make_spread_dy(problem, 721);
  BackwardForm form{.options = {.norm = PostExpertNorm{.eps = 1e-5}}};
  const GradientValues expected = run_backward(problem, dy, single_rank_of(GetParam()), form);
  EXPECT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), form)), "");
  form.slot_factor = 1.0 * GetParam().ranks;
  EXPECT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), form)), "");
}

/// Gradients that are not asked for are not computed, and those that are have the same bits.
TEST_P(CodedGradients, AreIndependentOfEachOther) {
  if (GetParam().ranks > 1) GTEST_SKIP() << "one rank says it";
  const MoeProblem problem = problem_of(730);
  const std::vector<BF16> dy = make_dy(problem, 731);
  const TokenCounts counts{problem.shape.num_tokens};
  const GradientValues expected = run_backward(problem, dy, GetParam());
  for (const std::optional<double> factor : {std::optional<double>(), std::optional(1.0)}) {
    const BackwardForm form{.slot_factor = factor};
    for (int asked = 0; asked < 3; ++asked) {
      Context context =
          make_context(training_config(problem, GetParam(), form, 61), GetParam(), nullptr);
      const RankCall call = pack_rank(problem, form_of(GetParam(), {}, false), counts, 0);
      const RankGradients gradients(problem, dy, form, counts, 0);
      RoutedGradients some = gradients.destinations();
      if (asked != 0) some.grad_w13_L2FD = {};
      if (asked != 1) some.grad_w2_LDF = {};
      if (asked != 2) some.grad_x_TD = {};
      routed_experts_backward(context, call_saving(context, call), gradients.dy(), call.weights,
                              some);
      GradientValues actual = expected;
      GradientValues all(problem);
      gradients.copy_to(all);
      if (asked == 0) actual.gate = all.gate, actual.up = all.up;
      if (asked == 1) actual.down = all.down;
      if (asked == 2) actual.x = all.x;
      actual.scores = all.scores;
      EXPECT_EQ(first_difference(expected, actual), "") << asked;
    }
  }
}

}  // namespace
}  // namespace distmoe::conformance
