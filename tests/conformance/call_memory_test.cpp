// SPDX-License-Identifier: Apache-2.0
//
// Invariant: on the CPU a call touches little besides its context's plan: at most 32 MiB of
// anonymous memory over the plans of the ranks of this process, whatever shapes follow each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "conformance/moe_gradients.hpp"
#include "conformance/moe_runner.hpp"
#include "conformance/process_usage.hpp"

namespace distmoe::conformance {
namespace {

/// The largest anonymous memory between construction and stop().
class PeakWatch {
 public:
  PeakWatch() : start_(anonymous_bytes()), peak_(start_), watcher_([this] { watch(); }) {}
  std::int64_t stop() {
    stop_ = true;
    watcher_.join();
    return std::max<std::int64_t>(peak_, anonymous_bytes()) - start_;
  }

 private:
  void watch() {
    while (!stop_) {
      peak_ = std::max<std::int64_t>(peak_, anonymous_bytes());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  std::int64_t start_;
  std::atomic<std::int64_t> peak_;
  std::atomic<bool> stop_{false};
  std::thread watcher_;
};

TEST(MemoryOfACall, PeakGrowthStaysWithinThePlanAnd32MiB) {
  if (!kSizesMeanSomething) GTEST_SKIP() << "sizes mean nothing under a sanitizer";
  for (const int ranks : {1, 2}) {
    const MoeCase moe_case{.ranks = ranks, .num_threads = 2};
    const MoeProblem problem = make_problem({.num_tokens = 2048,
                                             .hidden_dim = 256,
                                             .intermediate_dim = 192,
                                             .num_experts = 16,
                                             .top_k = 4},
                                            RoutePattern::kDistinct, 122);
    const TokenCounts counts = even_split(2048, ranks);
    Config config = config_of(problem, moe_case, {}, 2048 / ranks);
    config.device_scratch_capacity_factor = 1.25;
    std::vector<RankCall> calls;
    calls.reserve(static_cast<std::size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      calls.push_back(pack_rank(problem, {}, counts, rank));
    }
    std::atomic<std::int64_t> planned{0};
    PeakWatch watch;
    run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
      Context context = make_context(config, moe_case, communicator);
      planned += context.memory_plan().allocated_bytes;
      const RankCall& call = calls[static_cast<std::size_t>(communicator->rank())];
      for (int i = 0; i < 3; ++i) {
        routed_experts(context, call.input, call.weights, call.y_view());
      }
    });
    const std::int64_t growth = watch.stop();
    EXPECT_LE(growth, planned + (std::int64_t{32} << 20)) << ranks << " ranks";
    EXPECT_GT(growth, std::int64_t{1} << 20) << "the watch saw nothing";
  }
}

/// Steps with saved and with recomputed layers, of both policies and with a norm.
// reports: A102
TEST(MemoryOfATrainingStep, PeakGrowthStaysWithinThePlanAnd32MiB) {
  if (!kSizesMeanSomething) GTEST_SKIP() << "sizes mean nothing under a sanitizer";
  BackwardForm norm{.slot_factor = 1.0};
  norm.options.norm = PostExpertNorm{};
  for (const BackwardForm& form :
       {BackwardForm{}, BackwardForm{.slot_factor = 1.2},
        BackwardForm{.policy = ActivationPolicy::kLean, .slot_factor = 1.2}, norm}) {
    const MoeCase moe_case{.ranks = 2, .num_threads = 2};
    const MoeProblem problem = make_problem({.num_tokens = 1024,
                                             .hidden_dim = 256,
                                             .intermediate_dim = 192,
                                             .num_experts = 16,
                                             .top_k = 4},
                                            RoutePattern::kDistinct, 124);
    const std::vector<BF16> dy = make_dy(problem, 125);
    const TokenCounts counts = even_split(1024, moe_case.ranks);
    Config config = training_config(problem, moe_case, form, counts.back());
    config.device_scratch_capacity_factor = 1.25;
    std::vector<RankCall> calls;
    std::vector<RankGradients> gradients;
    calls.reserve(2);
    gradients.reserve(2);
    for (int rank = 0; rank < moe_case.ranks; ++rank) {
      calls.push_back(pack_rank(problem, {}, counts, rank));
      gradients.emplace_back(problem, dy, form, counts, rank);
    }
    std::atomic<std::int64_t> planned{0};
    PeakWatch watch;
    run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
      const auto rank = static_cast<std::size_t>(communicator->rank());
      Context context = make_context(config, moe_case, communicator);
      planned += context.memory_plan().allocated_bytes;
      for (int step = 0; step < 3; ++step) {
        call_backward(context, call_saving(context, calls[rank], form.options), calls[rank],
                      gradients[rank]);
      }
      EXPECT_EQ(context.allocated_bytes(), context.memory_plan().allocated_bytes);
    });
    const std::int64_t growth = watch.stop();
    EXPECT_LE(growth, planned + (std::int64_t{32} << 20));
    EXPECT_GT(growth, std::int64_t{1} << 20) << "the watch saw nothing";
  }
}

/// The call of the first `num_tokens` tokens.
void run_first_tokens(Context& context, const RankCall& call, std::int64_t num_tokens) {
  RoutedInput input = call.input;
  TensorView y = call.y_view();
  for (TensorView* view : {&input.x_TD, &input.topk_ids_TK, &input.topk_scores_TK, &y}) {
    view->shape[0] = num_tokens;
  }
  routed_experts(context, input, call.weights, y);
}

/// The matrix library generates code for every number of rows. In a process of its own for each
/// width: the library keeps one list of products.
void expect_bounded_code(std::int64_t hidden_dim, std::int64_t intermediate_dim) {
  constexpr std::int64_t kTokens = 400;
  const MoeCase moe_case{.ranks = 1, .num_threads = 2};
  const MoeProblem problem = make_problem({.num_tokens = kTokens,
                                           .hidden_dim = hidden_dim,
                                           .intermediate_dim = intermediate_dim,
                                           .num_experts = 1,
                                           .top_k = 1},
                                          RoutePattern::kDistinct, 123);
  const RankCall call = pack_rank(problem, {}, even_split(kTokens, 1), 0);
  const Config config = config_of(problem, moe_case, {}, kTokens);
  PeakWatch watch;
  Context context = make_context(config, moe_case, nullptr);
  run_first_tokens(context, call, kTokens);
  const std::int64_t touched = anonymous_bytes();
  for (std::int64_t tokens = 1; tokens < kTokens; ++tokens) {
    run_first_tokens(context, call, tokens);
  }
  EXPECT_LE(anonymous_bytes() - touched, std::int64_t{24} << 20);
  EXPECT_LE(watch.stop(), context.allocated_bytes() + (std::int64_t{32} << 20));
}

TEST(MemoryOfACall, MoreRowCountsThanTheLibraryKeepsStayWithin32MiB) {
  if (!kSizesMeanSomething) GTEST_SKIP() << "sizes mean nothing under a sanitizer";
  expect_bounded_code(2048, 256);
}

/// Widths that leave tails in vector registers, whose code is the larger.
TEST(MemoryOfACall, MoreRowCountsOfOddWidthsStayWithin32MiB) {
  if (!kSizesMeanSomething) GTEST_SKIP() << "sizes mean nothing under a sanitizer";
  expect_bounded_code(1111, 333);
}

}  // namespace
}  // namespace distmoe::conformance
