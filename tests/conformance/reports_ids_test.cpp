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
std::vector<BF16> expert_alone(const MoeProblem& problem, std::int64_t expert) {
  MoeProblem alone = problem;
  alone.shape.top_k = 1;
  alone.ids = {expert};
  alone.scores = {1.0f};
  return run(alone, {});
}

// reports: A19: 0.6 + 0.4 of one expert is that expert, not 0.6 of it.
TEST(ReportedIds, AnExpertNamedTwiceByATokenCountsTwice) {
  const MoeProblem problem = one_token(4, {3, 3}, {0.6f, 0.4f});
  const std::vector<BF16> alone = expert_alone(problem, 3);
  for (const int ranks : {1, 2, 3}) {
    const std::vector<BF16> y = run(problem, {.ranks = ranks});
    for (std::size_t d = 0; d < y.size(); ++d) {
      EXPECT_NEAR(to_float(y[d]), to_float(alone[d]), std::abs(to_float(alone[d])) * 0x1p-8);
    }
  }
  const MoeProblem table_row =
      one_token(144, {121, 62, 117, 62, 32, 13}, {0.3f, 0.2f, 0.15f, 0.14f, 0.11f, 0.1f});
  for (const int ranks : {1, 4}) {
    EXPECT_EQ(first_violation(table_row, run(table_row, {.ranks = ranks})), "");
  }
}

// reports: A20: sixteen rows of expert 1, none of its neighbours.
TEST(ReportedIds, EveryTokenNamingOneExpertTwiceOverflowsNothing) {
  MoeProblem problem = make_problem(
      {.num_tokens = 8, .hidden_dim = 10, .intermediate_dim = 6, .num_experts = 3, .top_k = 2},
      RoutePattern::kAllDisabled, 151);
  std::ranges::fill(problem.ids, 1);
  const Config config = config_of(problem, {}, {}, 8);
  Context context = make_context(config, {}, nullptr);
  const RankCall call = pack_rank(problem, {}, {8}, 0);
  routed_experts(context, call.input, call.weights, call.y_view());
  EXPECT_EQ(context.last_call().rows_per_expert, (std::vector<std::int64_t>{0, 16, 0}));
  EXPECT_EQ(first_violation(problem, call.y_rows()), "");
}

// reports: A24, A25: half of expert 2, nothing of the last expert.
TEST(ReportedIds, MinusOneIsNoExpert) {
  for (const float ignored : {0.5f, std::numeric_limits<float>::quiet_NaN()}) {
    const MoeProblem problem = one_token(4, {2, -1}, {0.5f, ignored});
    const std::vector<BF16> alone = expert_alone(problem, 2);
    for (const int ranks : {1, 2, 4}) {
      const std::vector<BF16> y = run(problem, {.ranks = ranks});
      for (std::size_t d = 0; d < y.size(); ++d) {
        EXPECT_EQ(to_float(y[d]), 0.5f * to_float(alone[d])) << d;
      }
    }
  }
}

// reports: A26
TEST(ReportedIds, IdsFarBeyondTheExpertsAreNamed) {
  for (const std::int64_t id : {std::int64_t{8}, std::int64_t{1000000}, std::int64_t{2147483647}}) {
    const MoeProblem problem = one_token(8, {3, id}, {0.5f, 0.5f});
    Context context = make_context(config_of(problem, {}, {}, 1), {}, nullptr);
    const RankCall wrong = pack_rank(problem, {}, {1}, 0);
    expect_error(
        outcome_of([&] { routed_experts(context, wrong.input, wrong.weights, wrong.y_view()); }),
        ErrorCode::kInvalidArgument, {"topk_ids[0, 1]", std::to_string(id), "0 to 7"});
    EXPECT_TRUE(wrong.is_y_untouched());
    const MoeProblem right = one_token(8, {3, 7}, {0.5f, 0.5f});
    const RankCall call = pack_rank(right, {}, {1}, 0);
    routed_experts(context, call.input, call.weights, call.y_view());
    EXPECT_EQ(first_violation(right, call.y_rows()), "");
  }
}

// reports: A27
TEST(ReportedIds, AThousandIdleCallsGiveZeros) {
  const MoeProblem problem = one_token(4, {-1, -1, -1}, {1.0f, 2.0f, 3.0f});
  Context context = make_context(config_of(problem, {}, {}, 1), {}, nullptr);
  RankCall call = pack_rank(problem, {}, {1}, 0);
  for (int i = 0; i < 1000; ++i) {
    call.y.poison();
    routed_experts(context, call.input, call.weights, call.y_view());
    const auto y = call.y_rows();
    ASSERT_TRUE(std::ranges::all_of(y, [](BF16 value) { return value.bits == 0; })) << i;
  }
  EXPECT_EQ(context.last_call().rows_per_expert, std::vector<std::int64_t>(4, 0));
  EXPECT_EQ(context.last_call().call, 1000);
}

// reports: A30, A31
TEST(ReportedIds, Int32AndInt64IdsGiveTheSameBits) {
  const MoeProblem problem = make_problem(
      {.num_tokens = 256, .hidden_dim = 12, .intermediate_dim = 6, .num_experts = 64, .top_k = 6},
      RoutePattern::kDistinct, 152);
  const std::vector<BF16> y32 = run(problem, {.ranks = 2}, {.id_dtype = DType::kI32});
  const std::vector<BF16> y64 = run(problem, {.ranks = 2}, {.id_dtype = DType::kI64});
  EXPECT_EQ(first_difference(y32, y64, 12), "");
  EXPECT_EQ(first_violation(problem, y32), "");
}

// reports: A33: ids = wide[:, :2] of six columns, scores likewise.
TEST(ReportedIds, ASliceOfAWiderTableIsReadByItsStride) {
  const MoeProblem problem = make_problem(
      {.num_tokens = 8, .hidden_dim = 12, .intermediate_dim = 6, .num_experts = 5, .top_k = 2},
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
  Context context = make_context(config_of(problem, {}, {}, 8), {}, nullptr);
  routed_experts(context, call.input, call.weights, call.y_view());
  EXPECT_EQ(first_difference(run(problem, {}), call.y_rows(), 12), "");
}

// reports: A34: experts of a larger tensor are read where they are; the plan doesn't grow.
TEST(ReportedStrides, AnExpertStrideIsReadWithoutACopy) {
  const MoeProblem problem = make_problem(
      {.num_tokens = 9, .hidden_dim = 12, .intermediate_dim = 6, .num_experts = 5, .top_k = 2},
      RoutePattern::kDistinct, 154);
  Context context = make_context(config_of(problem, {}, {}, 9), {}, nullptr);
  const std::int64_t bytes = context.allocated_bytes();
  const RankCall call = pack_rank(problem, {.is_strided = true}, {9}, 0);
  ASSERT_GT(call.weights.w13_L2FD.strides[0], 12 * 12);
  routed_experts(context, call.input, call.weights, call.y_view());
  EXPECT_EQ(first_difference(run(problem, {}), call.y_rows(), 12), "");
  EXPECT_EQ(context.allocated_bytes(), bytes);
}

// reports: A35, A37: D = 1025 works; a transposed view of the weights is refused with its strides.
TEST(ReportedStrides, OddRowsWorkAndTransposedWeightsAreNamed) {
  const MoeProblem problem = make_problem(
      {.num_tokens = 4, .hidden_dim = 1025, .intermediate_dim = 24, .num_experts = 4, .top_k = 2},
      RoutePattern::kDistinct, 155);
  EXPECT_EQ(first_violation(problem, run(problem, {})), "");
  RankCall call = pack_rank(problem, {}, {4}, 0);
  call.weights.w2_LDF = TensorView::strided(call.weights.w2_LDF.data, DType::kBF16, {4, 1025, 24},
                                            {1025 * 24, 1, 1025});
  Context context = make_context(config_of(problem, {}, {}, 4), {}, nullptr);
  expect_error(
      outcome_of([&] { routed_experts(context, call.input, call.weights, call.y_view()); }),
      ErrorCode::kInvalidArgument, {"w2", "strides [24600, 1, 1025]"});
}

// reports: A39, A40, A41: row counts that no tile divides.
TEST(ReportedTokenCounts, RowsThatNoTileDividesAreComputedAlike) {
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
    MoeProblem problem = make_problem({.num_tokens = static_cast<std::int64_t>(ids.size()),
                                       .hidden_dim = 6,
                                       .intermediate_dim = 4,
                                       .num_experts = experts,
                                       .top_k = 1},
                                      RoutePattern::kAllDisabled, 156);
    problem.ids = ids;
    EXPECT_EQ(first_violation(problem, run(problem, {.ranks = c.ranks})), "") << ids.size();
  }
}

// reports: A55: one token of eight routes over 256 experts makes eight rows, without padding.
TEST(ReportedTokenCounts, FewTokensManyExpertsMakeNoPadding) {
  const MoeProblem problem = make_problem(
      {.num_tokens = 1, .hidden_dim = 6, .intermediate_dim = 4, .num_experts = 256, .top_k = 8},
      RoutePattern::kDistinct, 157);
  const Config config = config_of(problem, {}, {}, 1);
  EXPECT_EQ(plan_memory(config, 1).device_scratch_rows, 8);
  Context context = make_context(config, {}, nullptr);
  const RankCall call = pack_rank(problem, {}, {1}, 0);
  routed_experts(context, call.input, call.weights, call.y_view());
  EXPECT_EQ(context.last_call().rows_per_rank[0], 8);
}

// reports: A53: K > E has no meaning for distinct experts and is refused with both numbers.
TEST(ReportedTokenCounts, MoreRoutesThanExpertsAreRefused) {
  const MoeProblem problem = one_token(2, {0, 1, 0}, {1.0f, 1.0f, 1.0f});
  expect_error(outcome_of([&] { make_context(config_of(problem, {}, {}, 1), {}, nullptr); }),
               ErrorCode::kInvalidArgument, {"top_k", "3", "2"});
}

// reports: A99: planned for eight, called with nine.
TEST(ReportedTokenCounts, NineTokensWhereEightArePlanned) {
  const MoeProblem nine = make_problem(
      {.num_tokens = 9, .hidden_dim = 6, .intermediate_dim = 4, .num_experts = 3, .top_k = 2},
      RoutePattern::kDistinct, 158);
  Context context = make_context(config_of(nine, {}, {}, 8), {}, nullptr);
  const RankCall call = pack_rank(nine, {}, {9}, 0);
  expect_error(
      outcome_of([&] { routed_experts(context, call.input, call.weights, call.y_view()); }),
      ErrorCode::kInvalidArgument, {"T=9", "8"});
  EXPECT_TRUE(call.is_y_untouched());
  MoeProblem eight = nine;
  eight.shape.num_tokens = 8;
  const RankCall right = pack_rank(eight, {}, {8}, 0);
  routed_experts(context, right.input, right.weights, right.y_view());
  EXPECT_EQ(first_difference(run(eight, {}), right.y_rows(), 6), "");
}

}  // namespace
}  // namespace distmoe::conformance
