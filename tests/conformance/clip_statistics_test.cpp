// SPDX-License-Identifier: Apache-2.0
//
// Invariant: every forward, and nothing but a forward, overwrites the counts with those of the rows
// that this rank received; over all ranks they are those of the layer, whatever P is.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <mutex>

#include "conformance/moe_gradients.hpp"
#include "conformance/moe_refusal.hpp"

namespace distmoe::conformance {
namespace {

class ClipCounts : public testing::TestWithParam<MoeCase> {};
INSTANTIATE_TEST_SUITE_P(Laws, ClipCounts, testing::ValuesIn(training_cases()), case_name);

using Counts = std::array<std::int64_t, 3>;

constexpr MoeShape kShape{
    .num_tokens = 29, .hidden_dim = 16, .intermediate_dim = 300, .num_experts = 5, .top_k = 3};

/// From the rounded h1 of every enabled route; sums in FP64 of few terms round as FP32 sums do but
/// for ties, which random values do not meet.
Counts counts_of(const MoeProblem& problem, double limit) {
  Counts counts{};
  const std::int64_t d = problem.shape.hidden_dim;
  for (std::int64_t route = 0; route < problem.num_routes(); ++route) {
    const std::int64_t expert = problem.ids[static_cast<std::size_t>(route)];
    if (expert < 0) continue;
    const BF16* x = problem.x.data() + route / problem.shape.top_k * d;
    for (std::int64_t f = 0; f < problem.shape.intermediate_dim; ++f) {
      double g = 0;
      double u = 0;
      for (std::int64_t i = 0; i < d; ++i) {
        const auto at =
            static_cast<std::size_t>((expert * problem.shape.intermediate_dim + f) * d + i);
        g += double{to_float(problem.gate[at])} * to_float(x[i]);
        u += double{to_float(problem.up[at])} * to_float(x[i]);
      }
      counts[0] += to_float(to_bf16(g)) > limit ? 1 : 0;
      counts[1] += std::abs(to_float(to_bf16(u))) > limit ? 1 : 0;
      counts[2] += 1;
    }
  }
  return counts;
}

TEST_P(ClipCounts, AreThoseOfTheRowsReceived) {
  const MoeProblem problem = make_problem(kShape, RoutePattern::kMixed, 540);
  const TokenCounts counts = ragged_split(kShape.num_tokens, GetParam().ranks, 2);
  for (const double limit : {0.75, 0.0, -1.5}) {
    for (const bool saves : {false, true}) {
      Counts sum{};
      std::mutex mutex;
      run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
        Context context = make_context(training_config(problem, GetParam(), {}, kShape.num_tokens),
                                       GetParam(), communicator);
        const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
        Counts own{-7, -7, -7};
        std::array<float, 3> as_float{NAN, NAN, NAN};
        CallOptions options;
        options.clip_statistics = {{own.data(), DType::kI64, {3}}, limit};
        if (saves) {
          SavedForward saved =
              saving_routed_experts(context, call.input, call.weights, call.y_view(), options);
          const Counts before = own;
          routed_experts_backward(context, std::move(saved), call.input.x_TD, call.weights, {});
          EXPECT_EQ(own, before) << "a backward counted";
        } else {
          routed_experts(context, call.input, call.weights, call.y_view(), options);
        }
        options.clip_statistics.counts_3 = {as_float.data(), DType::kF32, {3}};
        routed_experts(context, call.input, call.weights, call.y_view(), options);
        const std::int64_t rows =
            context.last_call().rows_per_rank[static_cast<std::size_t>(communicator->rank())];
        EXPECT_EQ(own[2], rows * kShape.intermediate_dim);
        for (std::size_t i = 0; i < 3; ++i) {
          EXPECT_EQ(as_float[i], static_cast<float>(own[i]));
        }
        const std::scoped_lock lock(mutex);
        for (std::size_t i = 0; i < 3; ++i) sum[i] += own[i];
      });
      const Counts expected = counts_of(problem, limit);
      EXPECT_EQ(sum[2], expected[2]);
      // A rounding of h1 may fall to the other side of the limit.
      EXPECT_NEAR(static_cast<double>(sum[0]), static_cast<double>(expected[0]), 3.0) << limit;
      EXPECT_NEAR(static_cast<double>(sum[1]), static_cast<double>(expected[1]), 3.0) << limit;
    }
  }
}

TEST_P(ClipCounts, OfNaNRowsCountNothingButPairs) {
  MoeProblem problem = make_problem(kShape, RoutePattern::kDistinct, 541);
  std::ranges::fill(problem.x, BF16{0x7FC0});
  const TokenCounts counts = even_split(kShape.num_tokens, GetParam().ranks);
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(config_of(problem, GetParam(), {}, kShape.num_tokens),
                                   GetParam(), communicator);
    const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
    Counts own{-7, -7, -7};
    CallOptions options;
    options.clip_statistics = {{own.data(), DType::kI64, {3}}, 0.0};
    routed_experts(context, call.input, call.weights, call.y_view(), options);
    EXPECT_EQ(own[0], 0);
    EXPECT_EQ(own[1], 0);
  });
}

TEST_P(ClipCounts, OfABadDestinationAreRefusedAndUntouched) {
  const MoeProblem problem = make_problem(kShape, RoutePattern::kMixed, 542);
  const TokenCounts counts = even_split(kShape.num_tokens, GetParam().ranks);
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(config_of(problem, GetParam(), {}, kShape.num_tokens),
                                   GetParam(), communicator);
    const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
    Counts own{-7, -7, -7};
    const auto expect_refused = [&](const ClipStatistics& clip, const std::string& word) {
      CallOptions options;
      options.clip_statistics = clip;
      expect_error(outcome_of([&] {
                     routed_experts(context, call.input, call.weights, call.y_view(), options);
                   }),
                   ErrorCode::kInvalidArgument, {word});
      EXPECT_TRUE(call.is_y_untouched());
      EXPECT_EQ(own, (Counts{-7, -7, -7}));
    };
    expect_refused({{own.data(), DType::kI64, {2}}, 1.0}, "clip_statistics.counts must have shape");
    expect_refused({{own.data(), DType::kI32, {3}}, 1.0}, "clip_statistics.counts must be int64");
    expect_refused({{own.data(), DType::kI64, {3}}, NAN}, "clip_statistics.limit is nan");
    expect_refused({{own.data(), DType::kI64, {3}}, INFINITY}, "clip_statistics.limit is inf");
    expect_refused({{own.data(), DType::kI64, {3}}, 1e39}, "clip_statistics.limit is 1e+39");
  });
}

}  // namespace
}  // namespace distmoe::conformance
