// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a routing that needs more rows than any rank's plan has is refused on every rank in
// the same call, with the overflowing rank and both numbers; nothing is written and the next call
// works. One row less is computed in full: nothing is ever dropped.
#include <gtest/gtest.h>

#include <algorithm>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"
#include "conformance/moe_runner.hpp"
#include "plan/layer_bytes.hpp"

namespace distmoe::conformance {
namespace {

class Capacity : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, Capacity, testing::ValuesIn(group_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Coded, Capacity, testing::ValuesIn(coded_group_cases()), case_name);

/// 16 tokens a rank, K = 1 and a factor of 1.5: 24 rows a rank at most.
constexpr std::int64_t kTokens = 16;
constexpr std::int64_t kRows = 24;

MoeProblem problem_of(const MoeCase& moe_case, std::uint64_t seed) {
  return make_problem(fit({.num_tokens = kTokens * moe_case.ranks,
                           .hidden_dim = 14,
                           .intermediate_dim = 12,
                           .num_experts = 3 * moe_case.ranks,
                           .top_k = 1},
                          moe_case),
                      RoutePattern::kDistinct, seed);
}

Config tight_config(const MoeProblem& problem, const MoeCase& moe_case) {
  Config config = config_of(problem, moe_case, {}, kTokens);
  config.device_scratch_capacity_factor = 1.5;
  config.distinct_experts = true;
  return config;
}

/// `rows` tokens to the first expert of the last rank, the others spread over the other ranks.
void fill_last_rank(MoeProblem& problem, const MoeCase& moe_case, std::int64_t rows) {
  const std::int64_t full = 3 * (moe_case.ranks - 1);
  for (std::int64_t token = 0; token < problem.shape.num_tokens; ++token) {
    problem.ids[static_cast<std::size_t>(token)] = token < rows ? full : token % full;
  }
}

// reports: A14, A15, A17, A18, A99
TEST_P(Capacity, OneRowTooManyIsRefusedOnEveryRankAndTheNextCallWorks) {
  const MoeCase& moe_case = GetParam();
  MoeProblem fits = problem_of(moe_case, 80);
  fill_last_rank(fits, moe_case, kRows);
  MoeProblem overflows = fits;
  fill_last_rank(overflows, moe_case, kRows + 1);
  const std::vector<BF16> expected = run(fits, single_rank_of(moe_case));
  const TokenCounts counts = even_split(fits.shape.num_tokens, moe_case.ranks);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(tight_config(fits, moe_case), moe_case, communicator);
    for (int round = 0; round < 3; ++round) {
      const RankCall wrong = pack_rank(overflows, {}, counts, communicator->rank());
      const Outcome outcome = outcome_of([&] { call_experts(context, wrong); });
      expect_error(
          outcome, ErrorCode::kCapacityExceeded,
          {"rank " + std::to_string(moe_case.ranks - 1) + " ", "25 required", "24 available",
           "device_scratch_capacity_factor", "call " + std::to_string(2 * round + 1)});
      EXPECT_EQ(outcome.message.find("distinct_experts"), std::string::npos) << outcome.message;
      EXPECT_TRUE(wrong.is_y_of_a_failed_call(moe_case.backend));
      // The last routed call is still the one before where the call itself fails; a device that
      // finds the failure later leaves nothing of the call but its number.
      const bool host_waits = moe_case.backend == BackendKind::kCpu;
      const CallStatistics last = context.last_call();
      EXPECT_EQ(last.call, host_waits ? 2 * round : 2 * round + 1);
      if (host_waits && round > 0) {
        EXPECT_EQ(last.rows_per_rank.back(), kRows);
      }
      if (!host_waits) {
        EXPECT_TRUE(last.rows_per_rank.empty());
        EXPECT_TRUE(last.rows_per_expert.empty());
        EXPECT_EQ(last.device_scratch_bytes, 0);
        EXPECT_EQ(last.host_scratch_bytes, 0);
      }

      const RankCall right = pack_rank(fits, {}, counts, communicator->rank());
      call_experts(context, right);
      const auto y = gather_rows(*communicator, right.y_rows(), counts, fits.shape.hidden_dim);
      EXPECT_EQ(first_difference(expected, y, fits.shape.hidden_dim), "");
      EXPECT_EQ(context.last_call().rows_per_rank.back(), kRows);
      EXPECT_EQ(context.last_call().dropped_routes, 0);
    }
  });
}

// reports: A14: the collapsed router within a plan for the worst case.
TEST_P(Capacity, AllTokensToOneExpertFitAPlanForTheWorstCase) {
  const MoeCase& moe_case = GetParam();
  MoeProblem problem = problem_of(moe_case, 81);
  std::ranges::fill(problem.ids, 2);
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  Config config = tight_config(problem, moe_case);
  config.device_scratch_capacity_factor = moe_case.ranks;
  const std::vector<BF16> expected = run(problem, single_rank_of(moe_case));
  if (moe_case.precision == Precision::kBF16) {
    EXPECT_EQ(first_violation(problem, expected), "");
  }
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(config, moe_case, communicator);
    const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
    call_experts(context, call);
    const auto y = gather_rows(*communicator, call.y_rows(), counts, problem.shape.hidden_dim);
    EXPECT_EQ(first_difference(expected, y, problem.shape.hidden_dim), "");
    const CallStatistics statistics = context.last_call();
    EXPECT_EQ(statistics.rows_per_rank.front(), problem.shape.num_tokens);
    EXPECT_EQ(statistics.rows_per_expert[2], problem.shape.num_tokens);
    EXPECT_EQ(statistics.tokens, counts[static_cast<std::size_t>(communicator->rank())]);
    EXPECT_EQ(statistics.call, 1);
    EXPECT_EQ(statistics.rank_imbalance, moe_case.ranks);
    EXPECT_EQ(statistics.expert_imbalance, static_cast<double>(problem.shape.num_experts));
    EXPECT_EQ(statistics.dropped_routes, 0);
    // Only the rank that owns the expert has rows.
    EXPECT_EQ(statistics.device_scratch_bytes > 0, communicator->rank() == 0);
    EXPECT_LE(statistics.device_scratch_bytes, context.memory_plan().device_scratch_bytes);
  });
}

/// Host scratch plans for more rows than device scratch.
TEST_P(Capacity, HostScratchTakesWhatDeviceScratchCannot) {
  const MoeCase& moe_case = GetParam();
  if (is_block_scaled(moe_case.precision)) GTEST_SKIP() << "the padding of experts has room";
  MoeProblem problem = problem_of(moe_case, 82);
  std::ranges::fill(problem.ids, 0);
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  Config config = tight_config(problem, moe_case);
  config.device_scratch_capacity_factor = 1.0;
  config.host_scratch = HostScratch{};
  const std::vector<BF16> expected = run(problem, single_rank_of(moe_case));
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(config, moe_case, communicator);
    EXPECT_GT(context.memory_plan().host_scratch_bytes, 0);
    const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
    call_experts(context, call);
    const auto y = gather_rows(*communicator, call.y_rows(), counts, problem.shape.hidden_dim);
    EXPECT_EQ(first_difference(expected, y, problem.shape.hidden_dim), "");
  });
}

/// A plan for distinct experts is min(factor, K, L) deep; duplicates that exceed it say what to
/// change.
TEST_P(Capacity, DuplicatesBeyondThePlanNameDistinctExperts) {
  const MoeCase& moe_case = GetParam();
  MoeProblem problem = make_problem(fit({.num_tokens = 8 * moe_case.ranks,
                                         .hidden_dim = 6,
                                         .intermediate_dim = 4,
                                         .num_experts = moe_case.ranks,
                                         .top_k = 2},
                                        moe_case),
                                    RoutePattern::kDistinct, 83);
  const MoeProblem distinct = problem;
  std::ranges::fill(problem.ids, 0);
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  Config config = tight_config(problem, moe_case);
  config.max_tokens = 8;
  config.device_scratch_capacity_factor = moe_case.ranks;  // L = 1: a token brings one row
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(config, moe_case, communicator);
    const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
    const Outcome outcome = outcome_of([&] { call_experts(context, call); });
    expect_error(outcome, ErrorCode::kCapacityExceeded,
                 {std::to_string(16 * moe_case.ranks) + " required",
                  std::to_string(8 * moe_case.ranks) + " available", "distinct_experts = false"});
    EXPECT_TRUE(call.is_y_of_a_failed_call(moe_case.backend));
    const RankCall right = pack_rank(distinct, {}, counts, communicator->rank());
    EXPECT_NO_THROW(call_experts(context, right));
  });
}

}  // namespace
}  // namespace distmoe::conformance
