// SPDX-License-Identifier: Apache-2.0
//
// Invariant: y is a function of the token, its routes and the weights: with per_route no bit
// depends on the number of ranks, their worker threads, the split of the tokens over ranks, what
// else is in the call, or the run. With per_rank bits depend on the number of ranks alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfenv>
#include <mutex>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class Determinism : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, Determinism, testing::ValuesIn(all_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Coded, Determinism, testing::ValuesIn(coded_cases()), case_name);

constexpr MoeShape kShape{
    .num_tokens = 61, .hidden_dim = 56, .intermediate_dim = 72, .num_experts = 11, .top_k = 5};

/// What all cases must reproduce: one rank, or with per_rank as many ranks, one worker.
MoeCase reference_case(MoeCase moe_case) {
  if (moe_case.combine == Combine::kPerRoute) return single_rank_of(moe_case);
  moe_case.num_threads = 1;
  std::ranges::fill(moe_case.devices, 0);
  return moe_case;
}

MoeProblem problem_with_biases(const MoeCase& moe_case, std::uint64_t seed) {
  MoeProblem problem = make_problem(fit(kShape, moe_case), RoutePattern::kMixed, seed);
  add_biases(problem, seed + 1);
  return problem;
}

// reports: A90, A108
TEST_P(Determinism, RanksThreadsAndSplitsChangeNoBit) {
  const MoeProblem problem = problem_with_biases(GetParam(), 20);
  const MoeCase reference = reference_case(GetParam());
  const std::vector<BF16> expected = run(problem, reference);
  if (GetParam().precision == Precision::kBF16) {
    ASSERT_EQ(first_violation(problem, expected), "");
  }
  const std::int64_t width = problem.shape.hidden_dim;
  EXPECT_EQ(first_difference(expected, run(problem, GetParam()), width), "");
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const TokenCounts counts = ragged_split(kShape.num_tokens, GetParam().ranks, seed);
    EXPECT_EQ(first_difference(expected, run(problem, GetParam(), counts), width), "")
        << "split " << seed;
  }
}

/// A caller's thread may flush subnormals or round elsewhere; workers have what their creator had.
TEST_P(Determinism, TheCallersFloatingPointEnvironmentChangesNoBit) {
  const MoeProblem problem = problem_with_biases(GetParam(), 25);
  const std::vector<BF16> expected = run(problem, GetParam());
  ASSERT_EQ(std::fesetround(FE_TOWARDZERO), 0);
  const std::vector<BF16> y = run(problem, GetParam());
  const int direction = std::fegetround();
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(first_difference(expected, y, problem.shape.hidden_dim), "");
  EXPECT_EQ(direction, FE_TOWARDZERO);
}

// reports: A87, A88, A89, A90: forty repeats on one context, calls of another size between them.
TEST_P(Determinism, FortyRepeatsAreBitwiseEqual) {
  const MoeProblem problem = problem_with_biases(GetParam(), 30);
  MoeShape other_shape = problem.shape;
  other_shape.num_tokens = 7;
  MoeProblem other = problem;  // the same weights, fewer tokens
  other.shape = other_shape;
  const MoeCase& moe_case = GetParam();
  const TokenCounts counts = ragged_split(kShape.num_tokens, moe_case.ranks, 3);
  const TokenCounts other_counts = even_split(other_shape.num_tokens, moe_case.ranks);
  const Config config = config_of(problem, moe_case, {}, kShape.num_tokens);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(config, moe_case, communicator);
    const CallForm form = form_of(moe_case);
    RankCall call = pack_rank(problem, form, counts, communicator->rank());
    const RankCall other_call = pack_rank(other, form, other_counts, communicator->rank());
    std::vector<BF16> first;
    for (int repeat = 0; repeat < 40; ++repeat) {
      call.y.poison();
      call_experts(context, call);
      if (repeat == 0) first = call.y_rows();
      ASSERT_EQ(first_difference(first, call.y_rows(), problem.shape.hidden_dim), "") << repeat;
      call_experts(context, other_call);
    }
  });
}

/// A token alone, and the same token among many that share its experts, as far as the number of
/// rows leaves the library's choice of product alone (see kFewRows in backend/cpu/matmul.cpp).
TEST_P(Determinism, ATokenDoesNotDependOnItsPlaceInTheCall) {
  const MoeProblem problem = problem_with_biases(GetParam(), 40);
  const std::vector<BF16> expected = run(problem, reference_case(GetParam()));
  // The same tokens from the last to the first: every expert's rows keep their number.
  MoeProblem reversed = problem;
  const auto width = static_cast<std::size_t>(problem.shape.hidden_dim);
  const auto top_k = static_cast<std::size_t>(kShape.top_k);
  const auto tokens = static_cast<std::size_t>(kShape.num_tokens);
  for (std::size_t token = 0; token < tokens; ++token) {
    const std::size_t from = tokens - 1 - token;
    std::copy_n(problem.x.begin() + static_cast<std::ptrdiff_t>(from * width), width,
                reversed.x.begin() + static_cast<std::ptrdiff_t>(token * width));
    std::copy_n(problem.ids.begin() + static_cast<std::ptrdiff_t>(from * top_k), top_k,
                reversed.ids.begin() + static_cast<std::ptrdiff_t>(token * top_k));
    std::copy_n(problem.scores.begin() + static_cast<std::ptrdiff_t>(from * top_k), top_k,
                reversed.scores.begin() + static_cast<std::ptrdiff_t>(token * top_k));
  }
  const std::vector<BF16> actual = run(reversed, GetParam());
  for (std::size_t token = 0; token < tokens; ++token) {
    for (std::size_t d = 0; d < width; ++d) {
      ASSERT_EQ(expected[(tokens - 1 - token) * width + d].bits, actual[token * width + d].bits)
          << "token " << token << ", column " << d;
    }
  }
}

}  // namespace
}  // namespace distmoe::conformance
