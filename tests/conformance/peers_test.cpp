// SPDX-License-Identifier: Apache-2.0
//
// Invariant: ranks that disagree are told so, all of them; a rank that does not come is named by
// the others within the timeout; afterwards the context refuses every call and can still be closed.
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "conformance/hooked_communicator.hpp"
#include "conformance/moe_gradients.hpp"
#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

using std::chrono::milliseconds;

class Peers : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, Peers, testing::ValuesIn(group_cases()), case_name);

constexpr milliseconds kTimeout{2000};

/// A small layer, four tokens a rank, and what its calls need.
struct Layer {
  MoeCase moe_case;
  MoeProblem problem;
  TokenCounts counts;
  Config config;

  explicit Layer(const MoeCase& c, std::uint64_t seed = 90)
      : moe_case(c),
        problem(make_problem(fit({.num_tokens = 4 * c.ranks,
                                  .hidden_dim = 8,
                                  .intermediate_dim = 6,
                                  .num_experts = 7,
                                  .top_k = 3},
                                 c),
                             RoutePattern::kMixed, seed)),
        counts(even_split(problem.shape.num_tokens, c.ranks)),
        config(config_of(problem, c, {}, 4)) {
    config.timeout = kTimeout;
  }
  RankCall pack(int rank) const { return pack_rank(problem, {}, counts, rank); }
};

Outcome call_outcome(Context& context, const RankCall& call) {
  return outcome_of([&] { call_experts(context, call); });
}

std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

struct Difference {
  const char* field;
  void (*change)(Config&);
};
const Difference kDifferences[] = {
    {"max_tokens", [](Config& c) { ++c.max_tokens; }},
    {"hidden_dim", [](Config& c) { ++c.hidden_dim; }},
    {"intermediate_dim", [](Config& c) { ++c.intermediate_dim; }},
    {"top_k", [](Config& c) { --c.top_k; }},
    {"num_experts", [](Config& c) { ++c.num_experts; }},
    {"max_moe_layers_per_activation_slot",
     [](Config& c) { ++c.max_moe_layers_per_activation_slot; }},
    {"device_scratch_capacity_factor", [](Config& c) { c.device_scratch_capacity_factor = 1.25; }},
    {"activation_policy|inference", [](Config& c) { c.inference = false; }},
    {"distinct_experts", [](Config& c) { c.distinct_experts = true; }},
    {"host_scratch", [](Config& c) { c.host_scratch = HostScratch{}; }},
    {"combine",
     [](Config& c) {
       const bool per_route = c.combine == Combine::kPerRoute;
       c.combine = per_route ? Combine::kPerRank : Combine::kPerRoute;
     }},
    {"activation", [](Config& c) { c.activation = Activation::kSwiGLUClamped; }},
    {"swiglu_alpha", [](Config& c) { c.swiglu_alpha = 1.5; }},
    {"swiglu_limit", [](Config& c) { c.swiglu_limit = 6.0; }},
    {"gate_up_layout", [](Config& c) { c.gate_up_layout = GateUpLayout::kInterleaved; }},
    {"kernel_choice", [](Config& c) { c.kernel_choice = KernelChoice::kFixed; }},
    {"timeout", [](Config& c) { c.timeout = milliseconds(2500); }},
};

TEST_P(Peers, DifferentConfigurationsAreReportedToAllWithTheField) {
  const Layer layer(GetParam());
  int i = 0;
  for (const Difference& difference : kDifferences) {
    const int odd_rank = i++ % GetParam().ranks;
    run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
      Config config = layer.config;
      if (communicator->rank() == odd_rank) difference.change(config);
      const Outcome outcome = outcome_of([&] { make_context(config, GetParam(), communicator); });
      const std::string field = difference.field;
      expect_error(outcome, ErrorCode::kPeerMismatch, {field.substr(field.find('|') + 1), "rank"});
      // The group is still in step: a correct creation works.
      EXPECT_NO_THROW(make_context(layer.config, GetParam(), communicator));
    });
  }
}

TEST_P(Peers, AnIllegalConfigurationOfOneRankFailsOnAll) {
  const Layer layer(GetParam());
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Config config = layer.config;
    if (communicator->rank() == 1) config.top_k = 8;
    const Outcome outcome = outcome_of([&] { make_context(config, GetParam(), communicator); });
    expect_error(outcome, ErrorCode::kInvalidArgument, {"top_k", "8"});
    if (communicator->rank() != 1) expect_error(outcome, ErrorCode::kInvalidArgument, {"rank 1"});
  });
}

/// The peers come later than an illegal timeout would wait.
TEST_P(Peers, AnIllegalTimeoutIsRefusedWhoeverComesFirst) {
  const Layer layer(GetParam());
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Config config = layer.config;
    if (communicator->rank() == 1) {
      config.timeout = milliseconds(-1);
    } else {
      std::this_thread::sleep_for(milliseconds(100));
    }
    expect_error(outcome_of([&] { make_context(config, GetParam(), communicator); }),
                 ErrorCode::kInvalidArgument, {"timeout", "-1"});
  });
}

struct LoneFailure {
  std::function<void()> fail;
  ErrorCode code;
  std::string words;
};

/// What one rank alone meets inside a call, before any of its exchanges: the others hear of it at
/// once, and nobody takes the bytes of one exchange for those of another.
TEST_P(Peers, ARankThatFailsInsideACallIsHeardByAllAndClosesTheContext) {
  if (!contract_of(GetParam()).calls_ask_the_communicator) {
    GTEST_SKIP() << "calls of this backend have no exchange to fail in";
  }
  const Layer layer(GetParam());
  const LoneFailure failures[] = {
      {[] { throw std::bad_alloc(); }, ErrorCode::kOutOfMemory, "no memory"},
      {[] { throw Error(ErrorCode::kOutOfMemory, "a full library"); }, ErrorCode::kOutOfMemory,
       "a full library"},
      // Of a code that other calls give to all ranks.
      {[] { throw Error(ErrorCode::kUnsupported, "a transport's"); }, ErrorCode::kUnsupported,
       "a transport's"},
      {[] { throw std::runtime_error("a surprise"); }, ErrorCode::kInternal, "a surprise"}};
  constexpr int kExchanges = 4;  // headers, ids, rows, results
  for (const LoneFailure& failure : failures) {
    for (int exchange = 0; exchange < kExchanges; ++exchange) {
      SCOPED_TRACE(testing::Message() << failure.words << " before exchange " << exchange);
      run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
        const auto hooked = std::make_shared<HookedCommunicator>(communicator);
        Context context = make_context(layer.config, GetParam(), hooked);
        const RankCall call = layer.pack(communicator->rank());
        if (communicator->rank() == 1) {
          hooked->skip = exchange;
          hooked->hook = failure.fail;
        }
        const Outcome outcome = call_outcome(context, call);
        if (communicator->rank() == 1) {
          expect_error(outcome, failure.code, {failure.words});
        } else {
          expect_error(outcome, ErrorCode::kPeerLost, {"rank 1", failure.words});
          EXPECT_LT(outcome.seconds, 1.5);
        }
        EXPECT_TRUE(call.is_y_untouched());
        expect_error(call_outcome(context, call), ErrorCode::kClosed, {"close it"});
      });
    }
  }
}

/// Two contexts on one communicator, called in different orders. Where calls do not ask the
/// communicator, peers miss each other.
TEST_P(Peers, DifferentOrdersOfCallsAreReportedAndCloseTheContexts) {
  const bool are_compared = contract_of(GetParam()).calls_ask_the_communicator;
  const Layer layer(GetParam());
  const Layer other(GetParam(), 91);
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context first = make_context(layer.config, GetParam(), communicator);
    Context second = make_context(other.config, GetParam(), communicator);
    const RankCall call = layer.pack(communicator->rank());
    const RankCall other_call = other.pack(communicator->rank());
    const bool is_odd = communicator->rank() == 1;
    Context& called = is_odd ? second : first;
    const RankCall& made = is_odd ? other_call : call;
    if (are_compared) {
      expect_error(call_outcome(called, made), ErrorCode::kPeerMismatch,
                   {"rank 1", "call 1 of context", "same order"});
    } else {
      expect_error(call_outcome(called, made), ErrorCode::kPeerLost,
                   {rank_name(is_odd ? 0 : 1) + " did not arrive", "call 1"});
    }
    EXPECT_TRUE(made.is_y_of_a_failed_call(GetParam().backend));
    expect_error(call_outcome(called, made), ErrorCode::kClosed, {"call 1"});
    called.close();
    EXPECT_TRUE(called.is_closed());
  });
}

// reports: A06: three calls here, two there: the missing rank is named within the timeout.
TEST_P(Peers, AMissingCallIsReportedWithinTheTimeout) {
  const Layer layer(GetParam());
  const int missing = GetParam().ranks - 1;
  std::atomic<int> num_reported{0};
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(layer.config, GetParam(), communicator);
    const RankCall call = layer.pack(communicator->rank());
    for (int i = 0; i < 2; ++i) ASSERT_EQ(call_outcome(context, call).message, "");
    if (communicator->rank() == missing) {  // busy elsewhere until the others gave up
      while (num_reported < missing) std::this_thread::sleep_for(milliseconds(10));
      return;
    }
    RankCall third = layer.pack(communicator->rank());
    const Outcome outcome = call_outcome(context, third);
    ++num_reported;
    expect_error(outcome, ErrorCode::kPeerLost,
                 {rank_name(missing) + " did not arrive", rank_name(communicator->rank())});
    EXPECT_GT(outcome.seconds, 1.5);
    EXPECT_LT(outcome.seconds, 4.0);
    EXPECT_TRUE(third.is_y_of_a_failed_call(GetParam().backend));
    expect_error(call_outcome(context, third), ErrorCode::kClosed, {rank_name(missing)});
    context.close();
    expect_error(call_outcome(context, third), ErrorCode::kClosed, {"closed"});
  });
}

// reports: A06
TEST_P(Peers, AMissingBackwardIsReportedWithinTheTimeout) {
  Layer layer(GetParam());
  layer.config.inference = false;
  layer.config.activation_policy = ActivationPolicy::kLean;  // for every combine
  const int missing = 0;
  std::atomic<int> num_reported{0};
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(layer.config, GetParam(), communicator);
    const RankCall call = layer.pack(communicator->rank());
    SavedForward saved = call_saving(context, call);
    if (communicator->rank() == missing) {
      while (num_reported < GetParam().ranks - 1) std::this_thread::sleep_for(milliseconds(10));
      return;
    }
    const BackwardForm form{.policy = ActivationPolicy::kLean};
    const RankGradients gradients(layer.problem, make_dy(layer.problem, 91), form, layer.counts,
                                  communicator->rank());
    const auto backward = [&] { call_backward(context, std::move(saved), call, gradients); };
    const Outcome outcome = outcome_of(backward);
    ++num_reported;
    expect_error(outcome, ErrorCode::kPeerLost, {rank_name(missing) + " did not arrive"});
    EXPECT_GT(outcome.seconds, 1.5);
    EXPECT_LT(outcome.seconds, 4.0);
    EXPECT_TRUE(gradients.is_of_a_failed_call(GetParam().backend));
    expect_error(outcome_of(backward), ErrorCode::kClosed, {rank_name(missing)});
  });
}

// reports: A93, A94
TEST_P(Peers, ARankThatReturnsIsReportedAtOnce) {
  Layer layer(GetParam());
  layer.config.timeout = std::chrono::seconds(60);
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(layer.config, GetParam(), communicator);
    if (communicator->rank() == 0) return;
    const RankCall call = layer.pack(communicator->rank());
    const Outcome outcome = call_outcome(context, call);
    expect_error(outcome, ErrorCode::kPeerLost, {"rank 0 left the group"});
    EXPECT_LT(outcome.seconds, 10.0);
    EXPECT_TRUE(call.is_y_of_a_failed_call(GetParam().backend));
    expect_error(call_outcome(context, call), ErrorCode::kClosed, {"rank 0"});
  });
}

TEST_P(Peers, ARankThatThrowsIsReportedAtOnce) {
  Layer layer(GetParam());
  layer.config.timeout = std::chrono::seconds(60);
  const auto body = [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(layer.config, GetParam(), communicator);
    if (communicator->rank() == 1) throw std::runtime_error("the tokeniser fell over");
    const RankCall call = layer.pack(communicator->rank());
    const Outcome outcome = call_outcome(context, call);
    const bool has_reason = contract_of(GetParam()).calls_ask_the_communicator;
    const std::string words = has_reason ? "the tokeniser fell over" : "left the group";
    expect_error(outcome, ErrorCode::kPeerLost, {"rank 1", words});
    EXPECT_LT(outcome.seconds, 10.0);
    expect_error(call_outcome(context, call), ErrorCode::kClosed, {words});
  };
  EXPECT_THROW(run_group(GetParam(), body), std::runtime_error);
}

TEST_P(Peers, CreationWaitsNoLongerThanTheTimeout) {
  const Layer layer(GetParam());
  std::atomic<int> num_reported{0};
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    if (communicator->rank() == 0) {
      while (num_reported + 1 < GetParam().ranks) std::this_thread::sleep_for(milliseconds(10));
      return;
    }
    const Outcome outcome =
        outcome_of([&] { make_context(layer.config, GetParam(), communicator); });
    ++num_reported;
    expect_error(outcome, ErrorCode::kPeerLost, {"rank 0 did not arrive"});
    EXPECT_LT(outcome.seconds, 4.0);
  });
}

}  // namespace
}  // namespace distmoe::conformance
