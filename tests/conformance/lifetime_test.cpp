// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a context serves one call at a time and says so; it can be closed, destroyed and made
// again in any order and any number of times without anything left behind.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"
#include "conformance/moe_runner.hpp"
#include "conformance/process_usage.hpp"
#include "runtime/context_impl.hpp"
#include "runtime/forward.hpp"

namespace distmoe::conformance {
namespace {

class Lifetime : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, Lifetime, testing::ValuesIn(lifetime_cases()), case_name);

MoeProblem small_problem(const MoeCase& moe_case) {
  return make_problem(fit({.num_tokens = 5 * moe_case.ranks,
                           .hidden_dim = 9,
                           .intermediate_dim = 7,
                           .num_experts = 6,
                           .top_k = 3},
                          moe_case),
                      RoutePattern::kMixed, 110);
}

/// A context of one rank of a small problem, and its call.
struct Layer {
  MoeProblem problem;
  TokenCounts counts;
  Config config;
  explicit Layer(const MoeCase& c)
      : problem(small_problem(c)),
        counts(even_split(problem.shape.num_tokens, c.ranks)),
        config(config_of(problem, c, {}, 5)) {}
};

TEST_P(Lifetime, ClosingIsIdempotentAndLaterCallsSayClosed) {
  const Layer layer(GetParam());
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(layer.config, GetParam(), communicator);
    const RankCall call = pack_rank(layer.problem, {}, layer.counts, communicator->rank());
    call_experts(context, call);
    EXPECT_FALSE(context.is_closed());
    EXPECT_GT(context.allocated_bytes(), 0);
    for (int i = 0; i < 3; ++i) {
      context.close();
      EXPECT_TRUE(context.is_closed());
      EXPECT_EQ(context.allocated_bytes(), 0);
      expect_error(outcome_of([&] { call_experts(context, call); }), ErrorCode::kClosed,
                   {"closed"});
      expect_error(outcome_of([&] { context.last_call(); }), ErrorCode::kClosed, {"closed"});
      expect_error(outcome_of([&] { context.region_peaks(); }), ErrorCode::kClosed, {"closed"});
    }
  });
}

// reports: A97: another thread comes while the host of rank 0 is inside its call.
TEST_P(Lifetime, ASecondCallBeforeTheFirstEndedIsRefusedAndHarmsNothing) {
  const Layer layer(GetParam());
  const std::int64_t width = layer.problem.shape.hidden_dim;
  const std::vector<BF16> expected = run(layer.problem, single_rank_of(GetParam()));
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(layer.config, GetParam(), communicator);
    const RankCall call = pack_rank(layer.problem, {}, layer.counts, communicator->rank());
    const RankCall second = pack_rank(layer.problem, {}, layer.counts, communicator->rank());
    const PlacedCall placed(context.impl().device(), call);
    const PlacedCall overlapping(context.impl().device(), second);
    Outcome called;
    Outcome closed;
    const StepObserver observer = [&](ForwardStep next) {
      if (next != ForwardStep::kRoute || context.rank() != 0) return;
      std::thread([&] {
        called = outcome_of([&] { overlapping.call(context); });
        closed = outcome_of([&] { context.close(); });
      }).join();
    };
    run_forward(context.impl(),
                {placed.views.input, placed.views.weights, placed.views.y, {}, nullptr, &observer});
    context.check();
    placed.collect();
    overlapping.collect();
    if (context.rank() == 0) {
      expect_error(called, ErrorCode::kInvalidArgument, {"before the previous one ended"});
      expect_error(closed, ErrorCode::kInvalidArgument, {"before the previous one ended"});
      EXPECT_TRUE(second.is_y_untouched());
    }
    const auto y = gather_rows(*communicator, call.y_rows(), layer.counts, width);
    EXPECT_EQ(first_difference(expected, y, width), "");
    // Numbers of calls still agree on all ranks.
    EXPECT_NO_THROW(overlapping.call(context));
    EXPECT_NO_THROW(context.check());
    communicator->barrier(std::chrono::seconds(60));
  });
}

// reports: A95, A93
TEST_P(Lifetime, TwoHundredContextsLeaveNothingBehind) {
  const Layer layer(GetParam());
  std::int64_t memory = 0;
  std::int64_t descriptors = 0;
  std::int64_t threads = 0;
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    const RankCall call = pack_rank(layer.problem, {}, layer.counts, communicator->rank());
    const PlacedCall placed(device_of(GetParam(), communicator->rank()), call);
    for (int cycle = 0; cycle < 220; ++cycle) {
      {
        Context context = make_context(layer.config, GetParam(), communicator);
        placed.call(context);
        if (cycle % 3 == 0) context.close();
      }
      communicator->barrier(std::chrono::seconds(60));
      if (communicator->rank() == 0 && (cycle == 19 || cycle == 219)) {
        if (cycle == 219) {
          EXPECT_EQ(num_file_descriptors(), descriptors);
          EXPECT_NEAR(static_cast<double>(num_threads()), static_cast<double>(threads), 8);
          // What a driver keeps of the host's memory is its own affair.
          if (kSizesMeanSomething && GetParam().backend == BackendKind::kCpu) {
            EXPECT_NEAR(static_cast<double>(anonymous_bytes()), static_cast<double>(memory),
                        1 << 20);
          }
        }
        memory = anonymous_bytes();
        descriptors = num_file_descriptors();
        threads = num_threads();
      }
      communicator->barrier(std::chrono::seconds(60));
    }
  });
}

TEST_P(Lifetime, ContextsOfOneGroupAreDestroyedInAnyOrder) {
  const Layer layer(GetParam());
  run_group(GetParam(), [&](std::shared_ptr<Communicator> communicator) {
    auto first = std::make_unique<Context>(make_context(layer.config, GetParam(), communicator));
    auto second = std::make_unique<Context>(make_context(layer.config, GetParam(), communicator));
    const RankCall call = pack_rank(layer.problem, {}, layer.counts, communicator->rank());
    // Other ranks destroy in the other order, at another time.
    std::unique_ptr<Context>& gone = communicator->rank() % 2 == 0 ? first : second;
    std::unique_ptr<Context>& kept = communicator->rank() % 2 == 0 ? second : first;
    call_experts(*first, call);
    call_experts(*second, call);
    gone.reset();
    Context third = make_context(layer.config, GetParam(), communicator);
    communicator.reset();  // contexts keep the group alive
    EXPECT_NO_THROW(call_experts(third, call));
    kept.reset();
  });
}

/// A moved context works; what is left behind is closed.
TEST_P(Lifetime, AContextMayMove) {
  const Layer layer(GetParam());
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(layer.config, GetParam(), communicator);
    const RankCall call = pack_rank(layer.problem, {}, layer.counts, communicator->rank());
    Context moved = std::move(context);
    EXPECT_NO_THROW(call_experts(moved, call));
    EXPECT_EQ(moved.rank(), communicator->rank());
    // NOLINTBEGIN(bugprone-use-after-move): what a move leaves
    EXPECT_TRUE(context.is_closed());
    EXPECT_NO_THROW(context.close());
    for (const auto& use : std::initializer_list<std::function<void()>>{
             [&] { call_experts(context, call); }, [&] { context.rank(); },
             [&] { context.config(); }, [&] { context.last_call(); }, [&] { context.reset(); }}) {
      expect_error(outcome_of(use), ErrorCode::kClosed, {"moved from"});
    }
    // NOLINTEND(bugprone-use-after-move)
  });
}

[[noreturn]] void exit_with_an_open_context(const MoeCase& one) {
  const Layer layer(one);
  static Context* forgotten = nullptr;
  forgotten = new Context(make_context(layer.config, one, nullptr));
  const RankCall call = pack_rank(layer.problem, {}, layer.counts, 0);
  call_experts(*forgotten, call);
  std::exit(0);
}

// reports: A94: a context that nobody closed does not hold up or crash the end of the process.
TEST_P(Lifetime, AForgottenCloseLetsTheProcessExit) {
  MoeCase one = single_rank_of(GetParam());
  one.num_threads = GetParam().num_threads;
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(exit_with_an_open_context(one), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace distmoe::conformance
