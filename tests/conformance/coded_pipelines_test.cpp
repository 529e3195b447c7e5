// SPDX-License-Identifier: Apache-2.0
//
// Invariant: in low precision, for every number of tokens, the two pipelines, prepared weights and
// every number of ranks give the same bits, plain and with all options at once: clamped SwiGLU, a
// norm, disabled routes, gradients that are added up, layers that are saved or computed again; and
// the bits are those of the contract.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "conformance/coded_oracle.hpp"
#include "conformance/moe_gradients.hpp"
#include "conformance/moe_oracle.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class CodedPipelines : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, CodedPipelines, testing::ValuesIn(coded_cases()), case_name);

class CodedGradientPipelines : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, CodedGradientPipelines, testing::ValuesIn(coded_training_cases()),
                         case_name);

/// Around the blocks of 16 and 32, the padding of 128 rows and the ranks.
std::vector<std::int64_t> token_counts() {
  std::vector<std::int64_t> counts;
  for (std::int64_t tokens = 0; tokens <= 35; ++tokens) counts.push_back(tokens);
  for (const std::int64_t tokens : {63, 64, 65, 127, 128, 129, 257}) counts.push_back(tokens);
  return counts;
}

MoeProblem problem_of(std::int64_t tokens, bool has_options) {
  MoeProblem problem =
      make_problem_with_biases({.num_tokens = tokens,
                                .hidden_dim = 64,
                                .intermediate_dim = 32,
                                .num_experts = 5,
                                .top_k = 3},
                               RoutePattern::kMixed, 660 + static_cast<std::uint64_t>(tokens));
  if (!has_options) return problem;
  problem.activation = Activation::kSwiGLUClamped;
  problem.limit = 0.5;
  return problem;
}

/// The other pipeline, and weights prepared where the case's are not.
MoeCase other_form_of(MoeCase moe_case) {
  moe_case.pipeline = moe_case.pipeline == Pipeline::kMega ? Pipeline::kStaged : Pipeline::kMega;
  moe_case.is_prepared = !moe_case.is_prepared;
  return moe_case;
}

/// Rounding h1 once differently moves a code of h2 by a step: of few rows none level it out.
constexpr double kTolerance = 8e-3;

TEST_P(CodedPipelines, OfEveryNumberOfTokensHaveTheSameBits) {
  for (const bool has_options : {false, true}) {
    if (has_options && GetParam().combine == Combine::kPerRank) continue;  // a norm has per_route
    CallOptions options;
    OracleNorm norm;
    if (has_options) options.norm = PostExpertNorm{.eps = 0.01}, norm.eps = 0.01;
    for (const std::int64_t tokens : token_counts()) {
      SCOPED_TRACE(testing::Message() << "T=" << tokens << (has_options ? " with options" : ""));
      const MoeProblem problem = problem_of(tokens, has_options);
      const std::vector<BF16> y = run(problem, GetParam(), {}, options);
      ASSERT_EQ(std::ssize(y), tokens * 64);
      ASSERT_EQ(first_difference(y, run(problem, other_form_of(GetParam()), {}, options), 64), "");
      if (GetParam().combine == Combine::kPerRoute) {
        ASSERT_EQ(first_difference(y, run(problem, single_rank_of(GetParam()), {}, options), 64),
                  "");
      }
      if (GetParam().ranks > 1 || tokens > 65) continue;
      ASSERT_LE(relative_error(widened(y), coded_forward(problem, GetParam().precision, norm)),
                kTolerance);
    }
  }
}

TEST_P(CodedGradientPipelines, OfEveryNumberOfTokensHaveTheSameBits) {
  for (const bool has_options : {false, true}) {
    for (const std::int64_t tokens : token_counts()) {
      SCOPED_TRACE(testing::Message() << "T=" << tokens << (has_options ? " with options" : ""));
      const MoeProblem problem = problem_of(tokens, has_options);
      const std::vector<BF16> dy = make_dy(problem, 662);
      BackwardForm form{.accumulates = has_options, .initial = has_options ? 0.25 : 0.0};
      if (has_options) form.options.norm = PostExpertNorm{.eps = 1e-3};
      const GradientValues expected = run_backward(problem, dy, single_rank_of(GetParam()), form);
      form.slot_factor = 1.0 * GetParam().ranks;
      ASSERT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), form)), "");
      ASSERT_EQ(
          first_difference(expected, run_backward(problem, dy, other_form_of(GetParam()), form)),
          "");
      form.slot_factor.reset();
      ASSERT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), form)), "");
      if (GetParam().ranks > 1 || has_options || tokens > 65) continue;
      ASSERT_EQ(first_violation(problem, expected, coded_gradients(problem, dy), 2 * kTolerance),
                "");
    }
  }
}

}  // namespace
}  // namespace distmoe::conformance
