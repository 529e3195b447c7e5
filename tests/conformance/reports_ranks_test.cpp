// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the reported failures of ranks and experts without tokens, of imbalance and of groups
// that are no power of two, with the numbers of the reports.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class ReportedRanks : public MoeLaw {
 protected:
  MoeCase of_ranks(int ranks) const { return with_ranks(GetParam(), ranks); }
};
INSTANTIATE_TEST_SUITE_P(Reports, ReportedRanks, testing::ValuesIn(report_cases()), case_name);

/// Several calls of one context; each looks at its statistics and compares with one rank's result.
struct Step {
  MoeProblem problem;
  TokenCounts counts;
};

void run_steps(const MoeCase& moe_case, const std::vector<Step>& steps,
               const std::function<void(std::size_t step, const Context&)>& look = {}) {
  std::vector<std::vector<BF16>> expected;
  std::int64_t max_tokens = 1;
  for (const Step& step : steps) {
    expected.push_back(run(step.problem, single_rank_of(moe_case)));
    ASSERT_EQ(first_violation(step.problem, expected.back()), "");
    max_tokens = std::max(max_tokens, *std::max_element(step.counts.begin(), step.counts.end()));
  }
  const Config config = config_of(steps[0].problem, moe_case, {}, max_tokens);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(config, moe_case, communicator);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const auto& [problem, counts] = steps[i];
      const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
      call_experts(context, call);
      const std::int64_t width = problem.shape.hidden_dim;
      const auto y = gather_rows(*communicator, call.y_rows(), counts, width);
      EXPECT_EQ(first_difference(expected[i], y, width), "") << "step " << i;
      if (look) look(i, context);
    }
  });
}

/// Of widths that every backend takes.
constexpr std::int64_t kWidth = 16;

MoeProblem routed_to(std::int64_t tokens, std::int64_t experts, std::int64_t top_k,
                     const std::function<std::int64_t(std::int64_t route)>& id_of) {
  MoeProblem problem = make_problem({.num_tokens = tokens,
                                     .hidden_dim = kWidth,
                                     .intermediate_dim = 8,
                                     .num_experts = experts,
                                     .top_k = top_k},
                                    RoutePattern::kAllDisabled, 140);
  for (std::size_t route = 0; route < problem.ids.size(); ++route) {
    problem.ids[route] = id_of(static_cast<std::int64_t>(route));
  }
  return problem;
}

// reports: A01: rank 0 has no token and receives 72 rows; then the roles go round; then three idle.
TEST_P(ReportedRanks, AnIdleRankReceivesTheRowsOfAllOthers) {
  const MoeCase four = of_ranks(4);
  std::vector<Step> steps;
  for (std::int64_t idle = 0; idle < 4; ++idle) {
    TokenCounts counts(4, 4);
    counts[static_cast<std::size_t>(idle)] = 0;
    steps.push_back(
        {routed_to(12, 24, 6, [=](std::int64_t route) { return 6 * idle + route % 6; }), counts});
    TokenCounts busy(4, 0);
    busy[static_cast<std::size_t>(idle)] = 4;
    steps.push_back(
        {routed_to(4, 24, 6, [=](std::int64_t route) { return 6 * idle + route % 6; }), busy});
  }
  run_steps(four, steps, [](std::size_t step, const Context& context) {
    const std::vector<std::int64_t> rows = context.last_call().rows_per_rank;
    EXPECT_EQ(rows[step / 2], step % 2 == 0 ? 72 : 24);
    EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), std::int64_t{0}), rows[step / 2]);
  });
}

// reports: A02: a rank receives nothing, then sends nothing, then nobody has a token.
TEST_P(ReportedRanks, ARankMayReceiveNothingAndSendNothing) {
  const auto to_rank_0 = [](std::int64_t route) { return route % 3; };
  run_steps(of_ranks(2), {{routed_to(8, 6, 2, to_rank_0), {4, 4}},
                          {routed_to(4, 6, 2, to_rank_0), {4, 0}},
                          {routed_to(4, 6, 2, to_rank_0), {0, 4}},
                          {routed_to(0, 6, 2, to_rank_0), {0, 0}},
                          {routed_to(8, 6, 2, to_rank_0), {3, 5}}});
}

// reports: A03, A04: no token at all on one rank, with null pointers, then eight.
TEST_P(ReportedRanks, ACallWithoutTokensLeavesTheNextAlone) {
  const auto round_robin = [](std::int64_t route) { return route % 5; };
  run_steps(of_ranks(1),
            {{routed_to(0, 5, 2, round_robin), {0}},
             {routed_to(8, 5, 2, round_robin), {8}},
             {routed_to(0, 5, 2, round_robin), {0}}},
            [](std::size_t step, const Context& context) {
              EXPECT_EQ(context.last_call().tokens, step == 1 ? 8 : 0);
              EXPECT_EQ(context.last_call().rows_per_rank[0], step == 1 ? 16 : 0);
            });
}

// reports: A08, A10, A07: experts without rows between busy ones, with the counts of the reports.
TEST_P(ReportedRanks, ExpertsWithoutRowsBetweenBusyOnes) {
  for (const std::vector<std::int64_t>& counts :
       {std::vector<std::int64_t>{5, 0, 3, 0}, {8, 0, 8, 0}, {162, 0, 2577, 446, 0, 83}}) {
    std::vector<std::int64_t> ids;
    for (std::size_t expert = 0; expert < counts.size(); ++expert) {
      ids.insert(ids.end(), static_cast<std::size_t>(counts[expert]),
                 static_cast<std::int64_t>(expert));
    }
    const auto tokens = static_cast<std::int64_t>(ids.size());
    const MoeProblem problem =
        routed_to(tokens, static_cast<std::int64_t>(counts.size()), 1,
                  [&](std::int64_t route) { return ids[static_cast<std::size_t>(route)]; });
    for (const int ranks : {1, 3}) {
      run_steps(of_ranks(ranks), {{problem, even_split(tokens, ranks)}},
                [&](std::size_t, const Context& context) {
                  EXPECT_EQ(context.last_call().rows_per_expert, counts);
                });
    }
  }
}

// reports: A14, A15: 256 rows where a plan of 1.5 has 96; the next balanced call is right.
TEST_P(ReportedRanks, ACollapsedRouterIsRefusedOrRight) {
  const MoeCase four = of_ranks(4);
  const MoeProblem collapsed = routed_to(256, 16, 1, [](std::int64_t) { return 5; });
  const MoeProblem balanced = routed_to(256, 16, 1, [](std::int64_t route) { return route % 16; });
  const TokenCounts counts(4, 64);
  run_steps(four, {{collapsed, counts}, {balanced, counts}},
            [](std::size_t step, const Context& context) {
              EXPECT_EQ(context.last_call().rows_per_rank[1], step == 0 ? 256 : 64);
              EXPECT_EQ(context.last_call().dropped_routes, 0);  // reports: A18
            });
  Config config = config_of(collapsed, four, {}, 64);
  for (const auto& [factor, available] : {std::pair{1.5, "96"}, std::pair{1.0, "64"}}) {
    config.device_scratch_capacity_factor = factor;
    const std::vector<BF16> expected = run(balanced, of_ranks(1));
    run_group(four, [&](const std::shared_ptr<Communicator>& communicator) {
      Context context = make_context(config, four, communicator);
      const RankCall wrong = pack_rank(collapsed, {}, counts, communicator->rank());
      expect_error(outcome_of([&] { call_experts(context, wrong); }), ErrorCode::kCapacityExceeded,
                   {"rank 1", "256 required", std::string(available) + " available"});
      EXPECT_TRUE(wrong.is_y_of_a_failed_call(GetParam().backend));
      const RankCall right = pack_rank(balanced, {}, counts, communicator->rank());
      call_experts(context, right);
      const auto y = gather_rows(*communicator, right.y_rows(), counts, kWidth);
      EXPECT_EQ(first_difference(expected, y, kWidth), "");
    });
  }
}

// reports: A17: with room for 64 rows, 64 are right and 65 an error.
TEST_P(ReportedRanks, NothingIsCutSilently) {
  const MoeCase two = of_ranks(2);
  Config config = config_of(routed_to(1, 2, 1, [](std::int64_t) { return 0; }), two, {}, 40);
  config.device_scratch_capacity_factor = 1.6;  // 64 rows of 40 tokens
  for (const std::int64_t rows : {64, 65}) {
    const MoeProblem problem =
        routed_to(80, 2, 1, [=](std::int64_t route) { return route < rows ? 1 : 0; });
    const TokenCounts counts(2, 40);
    const std::vector<BF16> expected = run(problem, of_ranks(1));
    run_group(two, [&](const std::shared_ptr<Communicator>& communicator) {
      Context context = make_context(config, two, communicator);
      const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
      const Outcome outcome = outcome_of([&] { call_experts(context, call); });
      if (rows == 65) {
        expect_error(outcome, ErrorCode::kCapacityExceeded, {"65 required", "64 available"});
        return;
      }
      ASSERT_EQ(outcome.message, "");
      const auto y = gather_rows(*communicator, call.y_rows(), counts, kWidth);
      EXPECT_EQ(first_difference(expected, y, kWidth), "");
    });
  }
}

// reports: A120: experts over ranks as even as possible, in blocks, a rank may own none.
TEST_P(ReportedRanks, ExpertsThatDoNotDivideAreSplitEvenly) {
  struct Split {
    std::int64_t experts;
    std::vector<std::int64_t> owned;
  };
  for (const Split& split :
       {Split{30, {4, 4, 4, 4, 4, 4, 3, 3}}, Split{128, {22, 22, 21, 21, 21, 21}},
        Split{384, {55, 55, 55, 55, 55, 55, 54}}, Split{8, {3, 3, 2}},
        Split{5, {1, 1, 1, 1, 1, 0, 0, 0}}}) {
    const int ranks = static_cast<int>(split.owned.size());
    const MoeProblem problem =
        routed_to(split.experts, split.experts, 1, [](std::int64_t route) { return route; });
    run_steps(of_ranks(ranks), {{problem, even_split(split.experts, ranks)}},
              [&](std::size_t, const Context& context) {
                const auto rank = static_cast<std::size_t>(context.rank());
                EXPECT_EQ(context.num_local_experts(), split.owned[rank]);
                EXPECT_EQ(context.first_expert(),
                          std::accumulate(split.owned.begin(),
                                          split.owned.begin() + static_cast<std::ptrdiff_t>(rank),
                                          std::int64_t{0}));
                EXPECT_EQ(context.last_call().rows_per_rank, split.owned);
              });
  }
}

}  // namespace
}  // namespace distmoe::conformance
