// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a backward of a forward that cannot have it now (none, another context's, not the last
// of its slot, of before a reset, one that had it) is refused on every rank and changes nothing;
// ranks that run backwards of different forwards are told so.
#include <gtest/gtest.h>

#include <vector>

#include "conformance/moe_gradients.hpp"
#include "conformance/moe_refusal.hpp"

namespace distmoe::conformance {
namespace {

class WrongForward : public testing::TestWithParam<MoeCase> {};
INSTANTIATE_TEST_SUITE_P(Laws, WrongForward, testing::ValuesIn(training_cases()), case_name);

/// A forward that cannot have its backward now, on every rank.
TEST_P(WrongForward, IsRefusedOnEveryRank) {
  const MoeCase& moe_case = GetParam();
  const MoeProblem problem = make_problem({.num_tokens = 5L * moe_case.ranks,
                                           .hidden_dim = 10,
                                           .intermediate_dim = 6,
                                           .num_experts = 5,
                                           .top_k = 2},
                                          RoutePattern::kMixed, 473);
  const std::vector<BF16> dy = make_dy(problem, 474);
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  const GradientValues expected = run_backward(problem, dy, {});
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Config config = training_config(problem, moe_case, {}, 5);
    config.max_moe_layers_per_activation_slot = 2;
    Context context = make_context(config, moe_case, communicator);
    const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
    const auto forward = [&] {
      return saving_routed_experts(context, call.input, call.weights, call.y_view());
    };
    const RankGradients gradients(problem, dy, {}, counts, communicator->rank());
    const auto backward = [&](SavedForward& saved) {
      routed_experts_backward(context, std::move(saved), gradients.dy(), call.weights,
                              gradients.destinations());
    };
    const auto expect_refused = [&](SavedForward& saved, const std::vector<std::string>& words) {
      expect_error(outcome_of([&] { backward(saved); }), ErrorCode::kInvalidArgument, words);
      EXPECT_TRUE(gradients.is_untouched());
    };
    SavedForward none;
    expect_refused(none, {"of no forward"});
    Context other = make_context(config, moe_case, communicator);
    SavedForward foreign = saving_routed_experts(other, call.input, call.weights, call.y_view());
    expect_refused(foreign, {"belongs to another context"});
    EXPECT_TRUE(foreign.is_live());
    SavedForward bottom = forward();
    SavedForward top = forward();
    expect_refused(bottom, {"is not the last one", "layer 1 waits"});
    EXPECT_TRUE(bottom.is_live());
    SavedForward stale = std::move(bottom);
    context.reset();
    expect_refused(stale, {"before a reset()"});
    expect_refused(top, {"before a reset()"});
    SavedForward fresh = forward();
    { const SavedForward unused = forward(); }
    expect_refused(fresh, {"needs reset()"});
    context.reset();
    SavedForward last = forward();
    // On the last rank alone.
    expect_refused(communicator->rank() + 1 == moe_case.ranks ? foreign : last,
                   {"belongs to another context", "rank " + std::to_string(moe_case.ranks - 1)});
    EXPECT_TRUE(last.is_live());
    backward(last);
    GradientValues actual = expected;
    gradients.copy_to(actual);
    EXPECT_EQ(first_difference(expected, actual), "");
    expect_error(outcome_of([&] { backward(last); }), ErrorCode::kInvalidArgument,
                 {"had its backward already"});
    SavedForward after = forward();
    context.close();
    expect_error(outcome_of([&] { backward(after); }), ErrorCode::kClosed, {"closed"});
  });
}

TEST(OtherForwards, OnOneRankAreAMismatch) {
  const MoeCase two{.ranks = 2};
  const MoeProblem problem = make_problem(
      {.num_tokens = 8, .hidden_dim = 10, .intermediate_dim = 6, .num_experts = 5, .top_k = 2},
      RoutePattern::kMixed, 475);
  const std::vector<BF16> dy = make_dy(problem, 476);
  const TokenCounts counts = even_split(8, 2);
  run_group(two, [&](const std::shared_ptr<Communicator>& communicator) {
    Config config = training_config(problem, two, {}, 4);
    config.num_activation_slots = 2;
    Context context = make_context(config, two, communicator);
    const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
    std::vector<SavedForward> saved;
    for (const std::int64_t slot : {0, 1}) {
      context.select_activation_slot(slot, 1);
      saved.push_back(saving_routed_experts(context, call.input, call.weights, call.y_view()));
    }
    const RankGradients gradients(problem, dy, {}, counts, communicator->rank());
    SavedForward& mine = saved[static_cast<std::size_t>(communicator->rank())];
    expect_error(outcome_of([&] {
                   routed_experts_backward(context, std::move(mine), gradients.dy(), call.weights,
                                           gradients.destinations());
                 }),
                 ErrorCode::kPeerMismatch, {"runs the backward of activation slot"});
    EXPECT_TRUE(gradients.is_untouched());
  });
}

}  // namespace
}  // namespace distmoe::conformance
