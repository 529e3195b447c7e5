// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a saving forward and a backward, with what they do to the slots, are one call each:
// what another thread brings meanwhile is refused and changes nothing.
#include <gtest/gtest.h>

#include <mutex>
#include <thread>

#include "conformance/moe_gradients.hpp"
#include "conformance/moe_refusal.hpp"
#include "runtime/backward.hpp"
#include "runtime/context_impl.hpp"
#include "runtime/forward.hpp"
#include "runtime/saved_forward_impl.hpp"

namespace distmoe::conformance {
namespace {

class TrainingLifetime : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, TrainingLifetime, testing::ValuesIn(lifetime_cases()), case_name);

MoeProblem small_problem(const MoeCase& moe_case) {
  return make_problem({.num_tokens = 4 * moe_case.ranks,
                       .hidden_dim = 9,
                       .intermediate_dim = 7,
                       .num_experts = 5,
                       .top_k = 3},
                      RoutePattern::kMixed, 510);
}

/// Another thread that tries everything on a context in the middle of a call.
class Meddler {
 public:
  Meddler(Context& context, const RankCall& call, SavedForward& live)
      : context_(context), call_(call), live_(live) {}

  void meddle() {
    std::thread([this] {
      for (const auto& attempt : std::initializer_list<std::function<void()>>{
               [this] { call_experts(context_, call_); },
               [this] { const SavedForward unused = call_saving(context_, call_); },
               [this] { call_backward(context_, std::move(live_), call_); },
               [this] { context_.select_activation_slot(0, 1); }, [this] { context_.reset(); },
               [this] { context_.last_call(); }, [this] { context_.close(); }}) {
        expect_error(outcome_of(attempt), ErrorCode::kInvalidArgument,
                     {"before the previous one ended"});
        ++num_attempts;
      }
    }).join();
    EXPECT_TRUE(call_.is_y_untouched());
    EXPECT_TRUE(live_.is_live());
  }
  int num_attempts = 0;

 private:
  Context& context_;
  const RankCall& call_;
  SavedForward& live_;
};

// reports: A97: at every step, the one in which the slot has the forward, or no longer, included.
TEST_P(TrainingLifetime, WhatComesDuringASavingForwardOrItsBackwardIsRefusedAndHarmsNothing) {
  const MoeProblem problem = small_problem(GetParam());
  const std::vector<BF16> dy = make_dy(problem, 511);
  const TokenCounts counts = even_split(problem.shape.num_tokens, GetParam().ranks);
  GradientValues actual(problem);
  std::mutex mutex;
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    const int rank = communicator->rank();
    Config config = training_config(problem, GetParam(), {}, counts.back());
    config.max_moe_layers_per_activation_slot = 2;
    Context context = make_context(config, GetParam(), communicator);
    ContextImpl& impl = context.impl();
    const RankCall call = pack_rank(problem, {}, counts, rank);
    const RankCall second = pack_rank(problem, {}, counts, rank);
    const RankGradients gradients(problem, dy, {}, counts, rank);
    SavedForward bottom = call_saving(context, call);
    Meddler meddler(context, second, bottom);
    const StepObserver in_forward = [&](ForwardStep next) {
      EXPECT_EQ(impl.slots()->num_live(0), next == ForwardStep::kEnd ? 2 : 1);
      if (rank == 0) meddler.meddle();
    };
    const BackwardStepObserver in_backward = [&](BackwardStep next) {
      EXPECT_EQ(impl.slots()->num_live(0), next == BackwardStep::kEnd ? 1 : 2);
      if (rank == 0) meddler.meddle();
    };
    std::unique_ptr<SavedForwardImpl> saved;
    run_forward(impl, {call.input, call.weights, call.y_view(), {}, &saved, &in_forward});
    const SavedForward top(std::move(saved));
    EXPECT_TRUE(top.is_live());
    run_backward(impl,
                 {top, gradients.dy(), call.weights, gradients.destinations(), {}, &in_backward});
    EXPECT_FALSE(top.is_live());
    EXPECT_EQ(meddler.num_attempts, rank == 0 ? 7 * (7 + 11) : 0);
    // Numbers of calls and the slots still agree on all ranks.
    EXPECT_NO_THROW(call_backward(context, std::move(bottom), call));
    EXPECT_TRUE(call_saving(context, second).is_live());
    const std::scoped_lock lock(mutex);
    gradients.copy_to(actual);
  });
  EXPECT_EQ(first_difference(run_backward(problem, dy, single_rank_of(GetParam())), actual), "");
}

/// Repeats a call until no other is in its way.
void insist(const std::function<void()>& call) {
  while (true) {
    try {
      return call();
    } catch (const Error& error) {
      const std::string_view words = error.what();
      if (words.find("before the previous one ended") == std::string_view::npos &&
          words.find("is not the last one") == std::string_view::npos) {
        throw;
      }
    }
  }
}

// reports: A97: nobody orders the threads; whatever is not refused is a whole call.
TEST(TrainingLifetimeOfOneRank, ThreadsThatDoNotWaitForEachOtherLoseNoCall) {
  const MoeCase one;
  const MoeProblem problem = small_problem(one);
  const std::vector<BF16> dy = make_dy(problem, 512);
  const TokenCounts counts{problem.shape.num_tokens};
  Config config = training_config(problem, one, {}, counts.back());
  config.max_moe_layers_per_activation_slot = 2;
  Context context = make_context(config, one, nullptr);
  const GradientValues expected = run_backward(problem, dy, one);
  constexpr int kRounds = 200;
  const auto train = [&] {
    const RankCall call = pack_rank(problem, {}, counts, 0);
    for (int round = 0; round < kRounds; ++round) {
      const RankGradients gradients(problem, dy, {}, counts, 0);
      SavedForward saved;
      insist([&] { saved = call_saving(context, call); });
      insist([&] { call_backward(context, std::move(saved), call, gradients); });
      GradientValues actual(problem);
      gradients.copy_to(actual);
      ASSERT_EQ(first_difference(expected, actual), "") << "round " << round;
    }
  };
  std::thread other([&] { EXPECT_NO_THROW(train()); });
  EXPECT_NO_THROW(train());
  other.join();
  EXPECT_EQ(context.impl().slots()->num_live(0), 0);
  EXPECT_FALSE(context.is_closed());
  EXPECT_NO_THROW(context.check());
}

}  // namespace
}  // namespace distmoe::conformance
