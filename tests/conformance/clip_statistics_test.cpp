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

class ClipCounts : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, ClipCounts, testing::ValuesIn(training_cases()), case_name);

using Counts = std::array<std::int64_t, 3>;

/// Holds -7 where nothing was counted.
PlacedTensor placed_counts(Context& context, DType dtype, std::int64_t elements = 3) {
  return {context, dtype, {elements}, [](const auto&) { return -7.0; }};
}

Counts counts_in(const PlacedTensor& tensor) {
  Counts counts{};
  const PackedTensor& host = tensor.collect();
  const bool is_float = host.view().dtype == DType::kF32;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    counts[i] = is_float ? static_cast<std::int64_t>(reinterpret_cast<float*>(host.data())[i])
                         : reinterpret_cast<std::int64_t*>(host.data())[i];
  }
  return counts;
}

CallOptions with_counts(const PlacedTensor& counts, double limit) {
  CallOptions options;
  options.clip_statistics = {counts.view(), limit};
  return options;
}

constexpr MoeShape kShape{
    .num_tokens = 29, .hidden_dim = 16, .intermediate_dim = 304, .num_experts = 5, .top_k = 3};

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
        const PlacedTensor counted = placed_counts(context, DType::kI64);
        const PlacedTensor counted_float = placed_counts(context, DType::kF32);
        if (saves) {
          SavedForward saved = call_saving(context, call, with_counts(counted, limit));
          const Counts before = counts_in(counted);
          call_backward(context, std::move(saved), call);
          EXPECT_EQ(counts_in(counted), before) << "a backward counted";
        } else {
          call_experts(context, call, with_counts(counted, limit));
        }
        call_experts(context, call, with_counts(counted_float, limit));
        const Counts own = counts_in(counted);
        const std::int64_t rows =
            context.last_call().rows_per_rank[static_cast<std::size_t>(communicator->rank())];
        EXPECT_EQ(own[2], rows * kShape.intermediate_dim);
        EXPECT_EQ(counts_in(counted_float), own);
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
    const PlacedTensor counted = placed_counts(context, DType::kI64);
    call_experts(context, call, with_counts(counted, 0.0));
    EXPECT_EQ(counts_in(counted)[0], 0);
    EXPECT_EQ(counts_in(counted)[1], 0);
  });
}

TEST_P(ClipCounts, OfABadDestinationAreRefusedAndUntouched) {
  const MoeProblem problem = make_problem(kShape, RoutePattern::kMixed, 542);
  const TokenCounts counts = even_split(kShape.num_tokens, GetParam().ranks);
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(config_of(problem, GetParam(), {}, kShape.num_tokens),
                                   GetParam(), communicator);
    const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
    const PlacedTensor counted = placed_counts(context, DType::kI64);
    const auto expect_refused = [&](const CallOptions& options, const std::string& word) {
      expect_error(outcome_of([&] { call_experts(context, call, options); }),
                   ErrorCode::kInvalidArgument, {word});
      EXPECT_TRUE(call.is_y_untouched());
      EXPECT_EQ(counts_in(counted), (Counts{-7, -7, -7}));
    };
    expect_refused(with_counts(placed_counts(context, DType::kI64, 2), 1.0),
                   "clip_statistics.counts must have shape");
    expect_refused(with_counts(placed_counts(context, DType::kI32), 1.0),
                   "clip_statistics.counts must be int64");
    expect_refused(with_counts(counted, NAN), "clip_statistics.limit is nan");
    expect_refused(with_counts(counted, INFINITY), "clip_statistics.limit is inf");
    expect_refused(with_counts(counted, 1e39), "clip_statistics.limit is 1e+39");
  });
}

}  // namespace
}  // namespace distmoe::conformance
