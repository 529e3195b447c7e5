// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a context serves one call at a time and says so; it can be closed, destroyed and made
// again in any order and any number of times without anything left behind.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "conformance/hooked_communicator.hpp"
#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"
#include "conformance/moe_runner.hpp"
#include "conformance/process_usage.hpp"

namespace distmoe::conformance {
namespace {

class Lifetime : public testing::TestWithParam<MoeCase> {};
INSTANTIATE_TEST_SUITE_P(Laws, Lifetime,
                         testing::Values(MoeCase{.ranks = 1, .num_threads = 3},
                                         MoeCase{.ranks = 3, .num_threads = 2}),
                         case_name);

MoeProblem small_problem(int ranks) {
  return make_problem({.num_tokens = 5 * ranks,
                       .hidden_dim = 9,
                       .intermediate_dim = 7,
                       .num_experts = 6,
                       .top_k = 3},
                      RoutePattern::kMixed, 110);
}

/// A context of one rank of a small problem, and its call.
struct Layer {
  MoeProblem problem;
  TokenCounts counts;
  Config config;
  explicit Layer(const MoeCase& c)
      : problem(small_problem(c.ranks)),
        counts(even_split(problem.shape.num_tokens, c.ranks)),
        config(config_of(problem, c, {}, 5)) {}
};

TEST_P(Lifetime, ClosingIsIdempotentAndLaterCallsSayClosed) {
  const Layer layer(GetParam());
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(layer.config, GetParam(), communicator);
    const RankCall call = pack_rank(layer.problem, {}, layer.counts, communicator->rank());
    routed_experts(context, call.input, call.weights, call.y_view());
    EXPECT_FALSE(context.is_closed());
    EXPECT_GT(context.allocated_bytes(), 0);
    for (int i = 0; i < 3; ++i) {
      context.close();
      EXPECT_TRUE(context.is_closed());
      EXPECT_EQ(context.allocated_bytes(), 0);
      expect_error(
          outcome_of([&] { routed_experts(context, call.input, call.weights, call.y_view()); }),
          ErrorCode::kClosed, {"closed"});
      expect_error(outcome_of([&] { context.last_call(); }), ErrorCode::kClosed, {"closed"});
      expect_error(outcome_of([&] { context.region_peaks(); }), ErrorCode::kClosed, {"closed"});
    }
  });
}

// reports: A97
TEST(LifetimeOfACall, ASecondCallBeforeTheFirstEndedIsRefusedAndHarmsNothing) {
  const MoeCase two{.ranks = 2, .num_threads = 2};
  const Layer layer(two);
  const std::vector<BF16> expected = run(layer.problem, {});
  run_group(two, [&](const std::shared_ptr<Communicator>& communicator) {
    const auto hooked = std::make_shared<HookedCommunicator>(communicator);
    Context context = make_context(layer.config, two, hooked);
    const RankCall call = pack_rank(layer.problem, {}, layer.counts, communicator->rank());
    const RankCall second = pack_rank(layer.problem, {}, layer.counts, communicator->rank());
    Outcome overlapping;
    Outcome closing;
    if (communicator->rank() == 0) {
      hooked->hook = [&] {
        std::thread([&] {
          overlapping = outcome_of(
              [&] { routed_experts(context, second.input, second.weights, second.y_view()); });
          closing = outcome_of([&] { context.close(); });
        }).join();
      };
    }
    routed_experts(context, call.input, call.weights, call.y_view());
    if (communicator->rank() == 0) {
      expect_error(overlapping, ErrorCode::kInvalidArgument, {"before the previous one ended"});
      expect_error(closing, ErrorCode::kInvalidArgument, {"before the previous one ended"});
      EXPECT_TRUE(second.is_y_untouched());
    }
    const auto y = gather_rows(*communicator, call.y_rows(), layer.counts, 9);
    EXPECT_EQ(first_difference(expected, y, 9), "");
    // Numbers of calls still agree on all ranks.
    EXPECT_NO_THROW(routed_experts(context, second.input, second.weights, second.y_view()));
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
    for (int cycle = 0; cycle < 220; ++cycle) {
      {
        Context context = make_context(layer.config, GetParam(), communicator);
        routed_experts(context, call.input, call.weights, call.y_view());
        if (cycle % 3 == 0) context.close();
      }
      communicator->barrier(std::chrono::seconds(60));
      if (communicator->rank() == 0 && (cycle == 19 || cycle == 219)) {
        if (cycle == 219) {
          EXPECT_EQ(num_file_descriptors(), descriptors);
          EXPECT_NEAR(static_cast<double>(num_threads()), static_cast<double>(threads), 8);
          if (kSizesMeanSomething) {
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
    routed_experts(*first, call.input, call.weights, call.y_view());
    routed_experts(*second, call.input, call.weights, call.y_view());
    gone.reset();
    Context third = make_context(layer.config, GetParam(), communicator);
    communicator.reset();  // contexts keep the group alive
    EXPECT_NO_THROW(routed_experts(third, call.input, call.weights, call.y_view()));
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
    EXPECT_NO_THROW(routed_experts(moved, call.input, call.weights, call.y_view()));
    EXPECT_EQ(moved.rank(), communicator->rank());
    // NOLINTBEGIN(bugprone-use-after-move): what a move leaves
    EXPECT_TRUE(context.is_closed());
    EXPECT_NO_THROW(context.close());
    for (const auto& use : std::initializer_list<std::function<void()>>{
             [&] { routed_experts(context, call.input, call.weights, call.y_view()); },
             [&] { context.rank(); }, [&] { context.config(); }, [&] { context.last_call(); },
             [&] { context.reset(); }}) {
      expect_error(outcome_of(use), ErrorCode::kClosed, {"moved from"});
    }
    // NOLINTEND(bugprone-use-after-move)
  });
}

[[noreturn]] void exit_with_an_open_context() {
  const MoeCase one{.ranks = 1, .num_threads = 3};
  const Layer layer(one);
  static Context* forgotten = nullptr;
  forgotten = new Context(make_context(layer.config, one, nullptr));
  const RankCall call = pack_rank(layer.problem, {}, layer.counts, 0);
  routed_experts(*forgotten, call.input, call.weights, call.y_view());
  std::exit(0);
}

// reports: A94: a context that nobody closed does not hold up or crash the end of the process.
TEST(LifetimeOfAProcess, AForgottenCloseLetsTheProcessExit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(exit_with_an_open_context(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace distmoe::conformance
