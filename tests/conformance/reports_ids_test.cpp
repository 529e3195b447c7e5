// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the reported failures of expert ids, strides and token counts, with the numbers of the
// reports.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class ReportedIds : public MoeLaw {
 protected:
  MoeCase of_ranks(int ranks) const { return with_ranks(GetParam(), ranks); }
  MoeCase one_rank() const { return of_ranks(1); }
};
class ReportedStrides : public ReportedIds {};
class ReportedTokenCounts : public ReportedIds {};
INSTANTIATE_TEST_SUITE_P(Reports, ReportedIds, testing::ValuesIn(report_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Reports, ReportedStrides, testing::ValuesIn(report_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Reports, ReportedTokenCounts, testing::ValuesIn(report_cases()),
                         case_name);

/// Of widths that every backend takes.
MoeProblem one_token(std::int64_t experts, std::vector<std::int64_t> ids,
                     std::vector<float> scores) {
  MoeProblem problem = make_problem({.num_tokens = 1,
                                     .hidden_dim = 24,
                                     .intermediate_dim = 16,
                                     .num_experts = experts,
                                     .top_k = static_cast<std::int64_t>(ids.size())},
                                    RoutePattern::kAllDisabled, 150);
  problem.ids = std::move(ids);
  problem.scores = std::move(scores);
  return problem;
}

/// The answer of one expert to the token, score 1.
std::vector<BF16> expert_alone(const MoeProblem& problem, std::int64_t expert,
                               const MoeCase& one_rank) {
  MoeProblem alone = problem;
  alone.shape.top_k = 1;
  alone.ids = {expert};
  alone.scores = {1.0f};
  return run(alone, one_rank);
}

// reports: A19: 0.6 + 0.4 of one expert is that expert, not 0.6 of it.
TEST_P(ReportedIds, AnExpertNamedTwiceByATokenCountsTwice) {
  const MoeProblem problem = one_token(4, {3, 3}, {0.6f, 0.4f});
  const std::vector<BF16> alone = expert_alone(problem, 3, one_rank());
  for (const int ranks : {1, 2, 3}) {
    const std::vector<BF16> y = run(problem, of_ranks(ranks));
    for (std::size_t d = 0; d < y.size(); ++d) {
      EXPECT_NEAR(to_float(y[d]), to_float(alone[d]), std::abs(to_float(alone[d])) * 0x1p-8);
    }
  }
  const MoeProblem table_row =
      one_token(144, {121, 62, 117, 62, 32, 13}, {0.3f, 0.2f, 0.15f, 0.14f, 0.11f, 0.1f});
  for (const int ranks : {1, 4}) {
    EXPECT_EQ(first_violation(table_row, run(table_row, of_ranks(ranks))), "");
  }
}

// reports: A20: sixteen rows of expert 1, none of its neighbours.
TEST_P(ReportedIds, EveryTokenNamingOneExpertTwiceOverflowsNothing) {
  MoeProblem problem = make_problem(
      fit({.num_tokens = 8, .hidden_dim = 10, .intermediate_dim = 6, .num_experts = 3, .top_k = 2},
          GetParam()),
      RoutePattern::kAllDisabled, 151);
  std::ranges::fill(problem.ids, 1);
  const Config config = config_of(problem, one_rank(), {}, 8);
  Context context = make_context(config, one_rank(), nullptr);
  const RankCall call = pack_rank(problem, {}, {8}, 0);
  call_experts(context, call);
  EXPECT_EQ(context.last_call().rows_per_expert, (std::vector<std::int64_t>{0, 16, 0}));
  EXPECT_EQ(first_violation(problem, call.y_rows()), "");
}

// reports: A24, A25: half of expert 2, nothing of the last expert.
TEST_P(ReportedIds, MinusOneIsNoExpert) {
  for (const float ignored : {0.5f, std::numeric_limits<float>::quiet_NaN()}) {
    const MoeProblem problem = one_token(4, {2, -1}, {0.5f, ignored});
    const std::vector<BF16> alone = expert_alone(problem, 2, one_rank());
    for (const int ranks : {1, 2, 4}) {
      const std::vector<BF16> y = run(problem, of_ranks(ranks));
      for (std::size_t d = 0; d < y.size(); ++d) {
        EXPECT_EQ(to_float(y[d]), 0.5f * to_float(alone[d])) << d;
      }
    }
  }
}

// reports: A26
TEST_P(ReportedIds, IdsFarBeyondTheExpertsAreNamed) {
  for (const std::int64_t id : {std::int64_t{8}, std::int64_t{1000000}, std::int64_t{2147483647}}) {
    const MoeProblem problem = one_token(8, {3, id}, {0.5f, 0.5f});
    Context context = make_context(config_of(problem, one_rank(), {}, 1), one_rank(), nullptr);
    const RankCall wrong = pack_rank(problem, {}, {1}, 0);
    expect_error(outcome_of([&] { call_experts(context, wrong); }), ErrorCode::kInvalidArgument,
                 {"topk_ids[0, 1]", std::to_string(id), "0 to 7"});
    EXPECT_TRUE(wrong.is_y_of_a_failed_call(GetParam().backend));
    const MoeProblem right = one_token(8, {3, 7}, {0.5f, 0.5f});
    const RankCall call = pack_rank(right, {}, {1}, 0);
    call_experts(context, call);
    EXPECT_EQ(first_violation(right, call.y_rows()), "");
  }
}

// reports: A27
TEST_P(ReportedIds, AThousandIdleCallsGiveZeros) {
  const MoeProblem problem = one_token(4, {-1, -1, -1}, {1.0f, 2.0f, 3.0f});
  Context context = make_context(config_of(problem, one_rank(), {}, 1), one_rank(), nullptr);
  RankCall call = pack_rank(problem, {}, {1}, 0);
  for (int i = 0; i < 1000; ++i) {
    call.y.poison();
    call_experts(context, call);
    const auto y = call.y_rows();
    ASSERT_TRUE(std::ranges::all_of(y, [](BF16 value) { return value.bits == 0; })) << i;
  }
  EXPECT_EQ(context.last_call().rows_per_expert, std::vector<std::int64_t>(4, 0));
  EXPECT_EQ(context.last_call().call, 1000);
}

// reports: A30, A31
TEST_P(ReportedIds, Int32AndInt64IdsGiveTheSameBits) {
  const MoeProblem problem = make_problem(fit({.num_tokens = 256,
                                               .hidden_dim = 12,
                                               .intermediate_dim = 6,
                                               .num_experts = 64,
                                               .top_k = 6},
                                              GetParam()),
                                          RoutePattern::kDistinct, 152);
  const std::vector<BF16> y32 = run(problem, of_ranks(2), {.id_dtype = DType::kI32});
  const std::vector<BF16> y64 = run(problem, of_ranks(2), {.id_dtype = DType::kI64});
  EXPECT_EQ(first_difference(y32, y64, problem.shape.hidden_dim), "");
  EXPECT_EQ(first_violation(problem, y32), "");
}

// reports: A33: ids = wide[:, :2] of six columns, scores likewise.
TEST_P(ReportedIds, ASliceOfAWiderTableIsReadByItsStride) {
  const MoeProblem problem = make_problem(
      fit({.num_tokens = 8, .hidden_dim = 12, .intermediate_dim = 6, .num_experts = 5, .top_k = 2},
          GetParam()),
      RoutePattern::kDistinct, 153);
  std::vector<std::int32_t> wide_ids(8 * 6, 4);
  std::vector<float> wide_scores(8 * 6, 99.0f);
  for (std::size_t token = 0; token < 8; ++token) {
    for (std::size_t k = 0; k < 2; ++k) {
      wide_ids[token * 6 + k] = static_cast<std::int32_t>(problem.ids[token * 2 + k]);
      wide_scores[token * 6 + k] = problem.scores[token * 2 + k];
    }
  }
  RankCall call = pack_rank(problem, {}, {8}, 0);
  call.input.topk_ids_TK = TensorView::strided(wide_ids.data(), DType::kI32, {8, 2}, {6, 1});
  call.input.topk_scores_TK = TensorView::strided(wide_scores.data(), DType::kF32, {8, 2}, {6, 1});
  Context context = make_context(config_of(problem, one_rank(), {}, 8), one_rank(), nullptr);
  call_experts(context, call);
  EXPECT_EQ(first_difference(run(problem, one_rank()), call.y_rows(), problem.shape.hidden_dim),
            "");
}

// reports: A34: experts of a larger tensor are read where they are; the plan doesn't grow.
TEST_P(ReportedStrides, AnExpertStrideIsReadWithoutACopy) {
  const MoeProblem problem = make_problem(
      fit({.num_tokens = 9, .hidden_dim = 12, .intermediate_dim = 6, .num_experts = 5, .top_k = 2},
          GetParam()),
      RoutePattern::kDistinct, 154);
  Context context = make_context(config_of(problem, one_rank(), {}, 9), one_rank(), nullptr);
  const std::int64_t bytes = context.allocated_bytes();
  const CallForm form{.is_strided = true, .row_step = contract_of(GetParam()).row_step};
  const RankCall call = pack_rank(problem, form, {9}, 0);
  const std::int64_t expert = 2 * problem.shape.intermediate_dim * problem.shape.hidden_dim;
  ASSERT_GT(call.weights.w13_L2FD.strides[0], expert);
  call_experts(context, call);
  EXPECT_EQ(first_difference(run(problem, one_rank()), call.y_rows(), problem.shape.hidden_dim),
            "");
  EXPECT_EQ(context.allocated_bytes(), bytes);
}

// reports: A35, A37: D = 1025 works; a transposed view of the weights is refused with its strides.
TEST_P(ReportedStrides, OddRowsWorkAndTransposedWeightsAreNamed) {
  const MoeProblem problem = make_problem(fit({.num_tokens = 4,
                                               .hidden_dim = 1025,
                                               .intermediate_dim = 24,
                                               .num_experts = 4,
                                               .top_k = 2},
                                              GetParam()),
                                          RoutePattern::kDistinct, 155);
  EXPECT_EQ(first_violation(problem, run(problem, one_rank())), "");
  const std::int64_t d = problem.shape.hidden_dim;
  RankCall call = pack_rank(problem, {}, {4}, 0);
  call.weights.w2_LDF =
      TensorView::strided(call.weights.w2_LDF.data, DType::kBF16, {4, d, 24}, {d * 24, 1, d});
  Context context = make_context(config_of(problem, one_rank(), {}, 4), one_rank(), nullptr);
  const std::string strides = std::to_string(d * 24) + ", 1, " + std::to_string(d);
  expect_error(outcome_of([&] { call_experts(context, call); }), ErrorCode::kInvalidArgument,
               {"w2", "strides [" + strides + "]"});
}

// reports: A39, A40, A41: row counts that no tile divides.
TEST_P(ReportedTokenCounts, RowsThatNoTileDividesAreComputedAlike) {
  struct Case {
    std::vector<std::int64_t> rows_per_expert;
    int ranks;
  };
  for (const Case& c :
       {Case{{44}, 1}, Case{{16333}, 1}, Case{{5, 27, 33, 1}, 1}, Case{{2}, 2}, Case{{3, 3}, 2},
        Case{{63, 65}, 2}, Case{{4095, 4095}, 2}, Case{{672, 672}, 2}}) {
    const auto experts = static_cast<std::int64_t>(c.rows_per_expert.size());
    std::vector<std::int64_t> ids;
    for (std::int64_t expert = 0; expert < experts; ++expert) {
      ids.insert(ids.end(),
                 static_cast<std::size_t>(c.rows_per_expert[static_cast<std::size_t>(expert)]),
                 expert);
    }
    MoeProblem problem = make_problem(fit({.num_tokens = static_cast<std::int64_t>(ids.size()),
                                           .hidden_dim = 6,
                                           .intermediate_dim = 4,
                                           .num_experts = experts,
                                           .top_k = 1},
                                          GetParam()),
                                      RoutePattern::kAllDisabled, 156);
    problem.ids = ids;
    EXPECT_EQ(first_violation(problem, run(problem, of_ranks(c.ranks))), "") << ids.size();
  }
}

// reports: A55: one token of eight routes over 256 experts makes eight rows, without padding.
TEST_P(ReportedTokenCounts, FewTokensManyExpertsMakeNoPadding) {
  const MoeProblem problem = make_problem(
      fit({.num_tokens = 1, .hidden_dim = 6, .intermediate_dim = 4, .num_experts = 256, .top_k = 8},
          GetParam()),
      RoutePattern::kDistinct, 157);
  const Config config = config_of(problem, one_rank(), {}, 1);
  EXPECT_EQ(plan_memory(config, 1).device_scratch_rows, 8);
  Context context = make_context(config, one_rank(), nullptr);
  const RankCall call = pack_rank(problem, {}, {1}, 0);
  call_experts(context, call);
  EXPECT_EQ(context.last_call().rows_per_rank[0], 8);
}

// reports: A53: K > E has no meaning for distinct experts and is refused with both numbers.
TEST_P(ReportedTokenCounts, MoreRoutesThanExpertsAreRefused) {
  const MoeProblem problem = one_token(2, {0, 1, 0}, {1.0f, 1.0f, 1.0f});
  expect_error(
      outcome_of([&] { make_context(config_of(problem, one_rank(), {}, 1), one_rank(), nullptr); }),
      ErrorCode::kInvalidArgument, {"top_k", "3", "2"});
}

// reports: A99: planned for eight, called with nine.
TEST_P(ReportedTokenCounts, NineTokensWhereEightArePlanned) {
  const MoeProblem nine = make_problem(
      fit({.num_tokens = 9, .hidden_dim = 6, .intermediate_dim = 4, .num_experts = 3, .top_k = 2},
          GetParam()),
      RoutePattern::kDistinct, 158);
  Context context = make_context(config_of(nine, one_rank(), {}, 8), one_rank(), nullptr);
  const RankCall call = pack_rank(nine, {}, {9}, 0);
  expect_error(outcome_of([&] { call_experts(context, call); }), ErrorCode::kInvalidArgument,
               {"T=9", "8"});
  EXPECT_TRUE(call.is_y_untouched());
  MoeProblem eight = nine;
  eight.shape.num_tokens = 8;
  const RankCall right = pack_rank(eight, {}, {8}, 0);
  call_experts(context, right);
  EXPECT_EQ(first_difference(run(eight, one_rank()), right.y_rows(), eight.shape.hidden_dim), "");
}

}  // namespace
}  // namespace distmoe::conformance
