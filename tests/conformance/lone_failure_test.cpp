// SPDX-License-Identifier: Apache-2.0
//
// Invariant: what one rank meets before, between or after its calls and tells is an error of every
// rank at once, with its code and words; nothing was written, live forwards stay live, and the next
// call gives the bits of a context to which nothing happened.
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <utility>

#include "conformance/moe_gradients.hpp"
#include "conformance/moe_refusal.hpp"
#include "distmoe/refusal.hpp"

namespace distmoe::conformance {
namespace {

class LoneFailure : public testing::TestWithParam<MoeCase> {};
INSTANTIATE_TEST_SUITE_P(Laws, LoneFailure, testing::ValuesIn(training_cases()), case_name);

const Error kReason(ErrorCode::kUnsupported, "x is of complex numbers");
constexpr std::int64_t kTokens = 4;  // a rank

/// The one that fails.
bool is_last(const Communicator& communicator) {
  return communicator.rank() == communicator.size() - 1;
}

struct Layer {
  MoeCase moe_case;
  MoeProblem problem;
  TokenCounts counts;
  Config config;

  explicit Layer(const MoeCase& c)
      : moe_case(c),
        problem(make_problem(fit({.num_tokens = kTokens * c.ranks,
                                  .hidden_dim = 10,
                                  .intermediate_dim = 6,
                                  .num_experts = 7,
                                  .top_k = 2},
                                 c),
                             RoutePattern::kMixed, 900)),
        counts(even_split(problem.shape.num_tokens, c.ranks)),
        config(training_config(problem, c, {.slot_factor = 1.0}, kTokens)) {}
  RankCall pack(int rank) const { return pack_rank(problem, {}, counts, rank); }
};

/// Fails unless this rank had kReason's code and words, with the rank that gave it.
void expect_told(const Outcome& outcome, const Communicator& communicator,
                 const std::string& call) {
  const std::string rank = "rank " + std::to_string(communicator.size() - 1);
  expect_error(outcome, ErrorCode::kUnsupported, {rank, call, kReason.what()});
}

TEST_P(LoneFailure, ARefusalTakesThePartOfAForwardWhetherItSavesOrNot) {
  const Layer layer(GetParam());
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(layer.config, GetParam(), communicator);
    const int rank = communicator->rank();
    const RankCall before = layer.pack(rank);
    call_experts(context, before);
    for (int i = 0; i < 2; ++i) {
      const RankCall call = layer.pack(rank);
      const Outcome outcome = outcome_of([&] {
        if (is_last(*communicator)) refuse_routed_experts(context, kReason);
        if (i == 0) call_experts(context, call);
        static_cast<void>(call_saving(context, call));
      });
      expect_told(outcome, *communicator, "call " + std::to_string(i + 2));
      EXPECT_TRUE(call.is_y_untouched());
    }
    const RankCall after = layer.pack(rank);
    SavedForward saved = call_saving(context, after);
    EXPECT_EQ(after.y.bytes(), before.y.bytes());
    call_backward(context, std::move(saved), after);
  });
}

TEST_P(LoneFailure, ARefusalTakesThePartOfABackwardWhoseForwardStaysLive) {
  const Layer layer(GetParam());
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(layer.config, GetParam(), communicator);
    const RankCall call = layer.pack(communicator->rank());
    SavedForward saved = call_saving(context, call);
    const Outcome outcome = outcome_of([&] {
      if (is_last(*communicator)) refuse_routed_experts_backward(context, kReason);
      call_backward(context, std::move(saved), call);
    });
    expect_told(outcome, *communicator, "call 2");
    EXPECT_TRUE(saved.is_live());
    call_backward(context, std::move(saved), call);
    EXPECT_FALSE(saved.is_live());
  });
}

TEST_P(LoneFailure, RanksAgreeThatNoneFailed) {
  const Layer layer(GetParam());
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(layer.config, GetParam(), communicator);
    const RankCall call = layer.pack(communicator->rank());
    call_experts(context, call);
    agree(context, std::nullopt);
    const Outcome outcome = outcome_of([&] {
      agree(context, is_last(*communicator) ? std::optional<Error>(kReason) : std::nullopt);
    });
    expect_told(outcome, *communicator, "after call 1");
    const RankCall again = layer.pack(communicator->rank());
    call_experts(context, again);
    EXPECT_EQ(again.y.bytes(), call.y.bytes());
    EXPECT_EQ(context.last_call().call, 2) << "an agreement is no call";
    context.close();
    expect_error(outcome_of([&] { agree(context, std::nullopt); }), ErrorCode::kClosed, {"closed"});
  });
}

TEST_P(LoneFailure, ACheckSeesWhatACallWouldRefuseButNoValue) {
  const Layer layer(GetParam());
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(layer.config, GetParam(), communicator);
    Arguments arguments{layer.pack(communicator->rank()), {}};
    arguments.y = arguments.packed.y_view();
    const auto check = [&] {
      check_routed_experts(context, arguments.packed.input, arguments.packed.weights, arguments.y);
    };
    arguments.set_id(0, 0, 1000);  // a value
    check();
    EXPECT_EQ(context.last_call().call, 0) << "a check is no call";
    arguments.packed.input.x_TD.shape[1] += 1;
    expect_error(outcome_of(check), ErrorCode::kInvalidArgument, {"x must have shape [T, "});
    EXPECT_TRUE(arguments.packed.is_y_untouched());
  });
}

/// What `child` returns, in a forked process that ends there; -1 where it does not within 20 s.
int exit_code_of_child(const std::function<int()>& child) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(20);
    _exit(child());
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// NOTE: one rank with worker threads; a forked child of a multi-threaded process may not do more.
TEST(Fork, AChildIsRefusedAndTheParentGoesOn) {
  const MoeCase one_rank{};
  const Layer layer(one_rank);
  Context context = Context::create(layer.config, {.num_threads = 3});
  const RankCall call = layer.pack(0);
  call_experts(context, call);
  EXPECT_EQ(exit_code_of_child([&] {
              const Outcome outcome = outcome_of([&] { call_experts(context, call); });
              const bool is_refused = outcome.code == ErrorCode::kUnsupported &&
                                      outcome.message.find("fork") != std::string::npos;
              const Outcome reset = outcome_of([&] { context.reset(); });
              context.close();
              return is_refused && reset.code == ErrorCode::kUnsupported ? 7 : 8;
            }),
            7);
  EXPECT_EQ(exit_code_of_child([&] {
              { const Context dropped = std::move(context); }
              return 7;
            }),
            7);
  const RankCall again = layer.pack(0);
  call_experts(context, again);
  EXPECT_EQ(again.y.bytes(), call.y.bytes());
}

}  // namespace
}  // namespace distmoe::conformance
