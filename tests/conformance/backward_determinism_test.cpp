// SPDX-License-Identifier: Apache-2.0
//
// Invariant: no bit of a gradient depends on the number of ranks, their threads, the split of the
// tokens, the run, what else the context does, or whether the forward saved or is computed again.
#include <gtest/gtest.h>

#include "conformance/moe_gradients.hpp"

namespace distmoe::conformance {
namespace {

class BackwardDeterminism : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, BackwardDeterminism, testing::ValuesIn(training_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Coded, BackwardDeterminism, testing::ValuesIn(coded_training_cases()),
                         case_name);

constexpr MoeShape kShape{
    .num_tokens = 61, .hidden_dim = 56, .intermediate_dim = 72, .num_experts = 11, .top_k = 5};

MoeProblem problem_with_biases(const MoeCase& moe_case, const MoeShape& shape, std::uint64_t seed) {
  return make_problem_with_biases(fit(shape, moe_case), RoutePattern::kMixed, seed);
}

// reports: A90, A108: P = 1, 2, 3, 4 give the same gradients, no 1/R or R factor.
TEST_P(BackwardDeterminism, RanksThreadsSplitsAndSavingChangeNoBit) {
  const MoeProblem problem = problem_with_biases(GetParam(), kShape, 430);
  const std::vector<BF16> dy = make_dy(problem, 431);
  for (const ActivationPolicy policy : policies_of(GetParam())) {
    const GradientValues expected =
        run_backward(problem, dy, single_rank_of(GetParam()), {.policy = policy});
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      const TokenCounts counts = ragged_split(kShape.num_tokens, GetParam().ranks, seed);
      for (const std::optional<double> factor :
           {std::optional<double>(), std::optional(1.0 * GetParam().ranks)}) {
        const BackwardForm form{.policy = policy, .slot_factor = factor};
        EXPECT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), counts, form)),
                  "")
            << "split " << seed << (factor ? ", saved" : ", recomputed");
      }
    }
  }
}

TEST_P(BackwardDeterminism, PerRankCombineChangesNoGradient) {
  MoeCase per_rank = GetParam();
  per_rank.combine = Combine::kPerRank;
  if (GetParam().precision != Precision::kBF16) GTEST_SKIP() << "lean is of bf16";
  const MoeProblem problem = problem_with_biases(GetParam(), kShape, 432);
  const std::vector<BF16> dy = make_dy(problem, 433);
  const BackwardForm form{.policy = ActivationPolicy::kLean};
  const GradientValues expected = run_backward(problem, dy, single_rank_of(GetParam()), form);
  EXPECT_EQ(first_difference(expected, run_backward(problem, dy, per_rank, form)), "");
}

/// Policies, norm and slots that a step can have.
std::vector<BackwardForm> forms_of(const MoeCase& moe_case) {
  const double saves = 1.0 * moe_case.ranks;
  std::vector<BackwardForm> forms;
  for (const std::optional<double> factor : {std::optional<double>(), std::optional(saves)}) {
    for (const ActivationPolicy policy : policies_of(moe_case)) {
      forms.push_back({.policy = policy, .slot_factor = factor});
    }
    if (moe_case.precision != Precision::kBF16) continue;
    forms.push_back({.slot_factor = factor});
    forms.back().options.norm = PostExpertNorm{.eps = 1e-5};
  }
  return forms;
}

// reports: A87, A88, A89, A90: forty repeats on one context, other calls between them.
TEST_P(BackwardDeterminism, FortyRepeatsAreBitwiseEqual) {
  MoeShape shape = kShape;
  shape.num_tokens = 31;
  const MoeProblem problem = problem_with_biases(GetParam(), shape, 434);
  MoeProblem other = problem;  // the same weights, fewer tokens
  other.shape.num_tokens = 7;
  const std::vector<BF16> dy = make_dy(problem, 435);
  const MoeCase& moe_case = GetParam();
  const TokenCounts counts = ragged_split(shape.num_tokens, moe_case.ranks, 3);
  const TokenCounts other_counts = even_split(7, moe_case.ranks);
  for (const BackwardForm& form : forms_of(moe_case)) {
    const Config config = training_config(problem, moe_case, form, shape.num_tokens);
    run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
      Context context = make_context(config, moe_case, communicator);
      const CallForm call_form = form_of(moe_case, {}, false);
      const RankCall call = pack_rank(problem, call_form, counts, communicator->rank());
      const RankCall other_call = pack_rank(other, call_form, other_counts, communicator->rank());
      GradientValues first(problem);
      for (int repeat = 0; repeat < 40; ++repeat) {
        SavedForward saved = call_saving(context, call, form.options);
        const bool is_recomputed = context.last_call().is_recomputed;
        if (moe_case.precision == Precision::kBF16) {
          EXPECT_EQ(is_recomputed, !form.slot_factor);
        }
        call_experts(context, other_call);
        const RankGradients gradients(problem, dy, form, counts, communicator->rank());
        call_backward(context, std::move(saved), call, gradients);
        EXPECT_EQ(context.last_call().is_recomputed, is_recomputed);
        GradientValues again(problem);
        gradients.copy_to(again);
        if (repeat == 0) first = again;
        ASSERT_EQ(first_difference(first, again), "") << repeat;
      }
    });
  }
}

}  // namespace
}  // namespace distmoe::conformance
