// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a saving forward gives the bits of the forward, whatever its slot keeps; all ranks
// decide alike; a slot is a stack whose state depends on the order of calls alone; what is wrong
// with a slot is an error on every rank that changes nothing.
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "conformance/moe_gradients.hpp"
#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class Saving : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, Saving, testing::ValuesIn(some_cases()), case_name);

class SavingTogether : public testing::TestWithParam<MoeCase> {};
INSTANTIATE_TEST_SUITE_P(Laws, SavingTogether,
                         testing::Values(MoeCase{.ranks = 2}, MoeCase{.ranks = 5}), case_name);

constexpr std::int64_t kTokens = 12;  // a rank, at most
constexpr std::int64_t kSlots = 3;
constexpr std::int64_t kLayers = 3;

MoeProblem problem_of(const MoeCase& moe_case, RoutePattern pattern, std::uint64_t seed) {
  const MoeShape shape{.num_tokens = kTokens * moe_case.ranks,
                       .hidden_dim = 22,
                       .intermediate_dim = 18,
                       .num_experts = 2 * moe_case.ranks + 1,
                       .top_k = 3};
  return make_problem(fit(shape, moe_case), pattern, seed);
}

/// Every token may be one rank's.
Config slots_config(const MoeProblem& problem, const MoeCase& moe_case,
                    std::optional<double> slot_factor,
                    ActivationPolicy policy = ActivationPolicy::kFull) {
  Config config = training_config(problem, moe_case, {.policy = policy, .slot_factor = slot_factor},
                                  kTokens * moe_case.ranks);
  config.max_moe_layers_per_activation_slot = kLayers;
  config.num_activation_slots = kSlots;
  return config;
}

/// A context with slots for all that a rank may get, and the rank's share of the problem.
void on_every_rank(const MoeCase& moe_case, const MoeProblem& problem,
                   const std::function<void(Context& context, const RankCall& call)>& body) {
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(slots_config(problem, moe_case, 1.0), moe_case, communicator);
    body(context, pack_rank(problem, {}, counts, communicator->rank()));
  });
}

Outcome backward_outcome(Context& context, SavedForward& saved, const RankCall& call) {
  return outcome_of([&] { call_backward(context, std::move(saved), call); });
}

Outcome saving_outcome(Context& context, const RankCall& call) {
  return outcome_of([&] { const SavedForward unused = call_saving(context, call); });
}

/// Fails the test where ranks hold different values.
void expect_same_on_all_ranks(Communicator& communicator, std::int64_t value) {
  std::vector<BF16> mine(1);
  mine[0] = to_bf16(static_cast<float>(value));
  const TokenCounts one(static_cast<std::size_t>(communicator.size()), 1);
  for (const BF16 theirs : gather_rows(communicator, mine, one, 1)) {
    EXPECT_EQ(to_float(theirs), static_cast<float>(value));
  }
}

TEST_P(Saving, GivesTheBitsOfTheForwardWhateverIsKept) {
  const MoeCase& moe_case = GetParam();
  for (const RoutePattern pattern : {RoutePattern::kDistinct, RoutePattern::kMixed}) {
    MoeProblem problem = problem_of(moe_case, pattern, 301);
    add_biases(problem, 302);
    const std::vector<BF16> expected = run(problem, single_rank_of(moe_case));
    const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
    for (const ActivationPolicy policy : {ActivationPolicy::kFull, ActivationPolicy::kLean}) {
      for (const std::optional<double> factor : {std::optional<double>(), std::optional(1.0)}) {
        run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
          Context context =
              make_context(slots_config(problem, moe_case, factor, policy), moe_case, communicator);
          const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
          const SavedForward saved = call_saving(context, call);
          EXPECT_TRUE(saved.is_live());
          EXPECT_EQ(context.last_call().slot, 0);
          EXPECT_EQ(context.last_call().is_recomputed, !factor);
          const auto y =
              gather_rows(*communicator, call.y_rows(), counts, problem.shape.hidden_dim);
          EXPECT_EQ(first_difference(expected, y, problem.shape.hidden_dim), "");
        });
      }
    }
  }
}

TEST_P(Saving, AForwardWithoutABackwardTouchesNoSlot) {
  const MoeCase& moe_case = GetParam();
  const MoeProblem problem = problem_of(moe_case, RoutePattern::kMixed, 303);
  const std::vector<BF16> expected = run(problem, single_rank_of(moe_case));
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(slots_config(problem, moe_case, 1.0), moe_case, communicator);
    const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
    const SavedForward saved = call_saving(context, call);
    const RegionPeaks before = context.region_peaks();
    for (int i = 0; i < 5; ++i) {
      call_experts(context, call);
      EXPECT_EQ(context.last_call().slot, -1);
    }
    EXPECT_EQ(context.region_peaks().slot_bytes, before.slot_bytes);
    EXPECT_TRUE(saved.is_live());
    // Three fit; the forwards in between took no place.
    const SavedForward second = call_saving(context, call);
    const SavedForward third = call_saving(context, call);
    EXPECT_EQ(third.slot_layer(), 2);
    const auto y = gather_rows(*communicator, call.y_rows(), counts, problem.shape.hidden_dim);
    EXPECT_EQ(first_difference(expected, y, problem.shape.hidden_dim), "");
  });
}

/// A rank's walk over the slots; every rank draws the same numbers.
class SlotWalk {
 public:
  SlotWalk(const MoeCase& moe_case, const MoeProblem& problem,
           const std::shared_ptr<Communicator>& communicator, std::uint64_t seed)
      : problem_(problem),
        expected_(run(problem, single_rank_of(moe_case))),
        ranks_(moe_case.ranks),
        communicator_(communicator),
        // Room for some layers of the fullest ranks.
        context_(make_context(slots_config(problem, moe_case, 1.2 / (moe_case.ranks + 2)), moe_case,
                              communicator)),
        random_(seed),
        stacks_(kSlots) {}

  void run_steps(int steps) {
    for (int i = 0; i < steps && !testing::Test::HasFailure(); ++i) step();
    while (const auto slot = any_live_slot()) backward(*slot);
    // All slots are empty again: each takes its full depth.
    for (std::size_t slot = 0; slot < kSlots; ++slot) {
      context_.select_activation_slot(static_cast<std::int64_t>(slot), kLayers);
      for (int layer = 0; layer < kLayers; ++layer) forward(slot);
    }
  }
  int num_recomputed = 0;
  int num_saved = 0;

 private:
  std::size_t pick(std::size_t end) { return random_() % end; }
  std::optional<std::size_t> any_live_slot() const {
    for (std::size_t slot = 0; slot < kSlots; ++slot) {
      if (!stacks_[slot].empty()) return slot;
    }
    return std::nullopt;
  }

  void step() {
    const std::size_t slot = pick(kSlots);
    const bool is_full = stacks_[slot].size() == kLayers;
    if (!stacks_[slot].empty() && (is_full || pick(3) == 0)) return backward(slot);
    if (pick(4) == 0) return forward_only();
    context_.select_activation_slot(static_cast<std::int64_t>(slot), kLayers);
    forward(slot);
  }

  TokenCounts next_counts() { return ragged_split(problem_.shape.num_tokens, ranks_, random_()); }

  void expect_right(const RankCall& call, const TokenCounts& counts) {
    const std::int64_t width = problem_.shape.hidden_dim;
    const auto y = gather_rows(*communicator_, call.y_rows(), counts, width);
    EXPECT_EQ(first_difference(expected_, y, width), "");
  }

  void forward_only() {
    const TokenCounts counts = next_counts();
    const RankCall call = pack_rank(problem_, {}, counts, communicator_->rank());
    call_experts(context_, call);
    expect_right(call, counts);
  }

  void forward(std::size_t slot) {
    const TokenCounts counts = next_counts();
    const RankCall call = pack_rank(problem_, {}, counts, communicator_->rank());
    SavedForward saved = call_saving(context_, call);
    EXPECT_EQ(saved.slot(), static_cast<std::int64_t>(slot));
    EXPECT_EQ(saved.slot_layer(), std::ssize(stacks_[slot]));
    stacks_[slot].push_back({std::move(saved), counts});
    expect_right(call, counts);
    const bool is_recomputed = context_.last_call().is_recomputed;
    ++(is_recomputed ? num_recomputed : num_saved);
    expect_same_on_all_ranks(*communicator_, is_recomputed ? 1 : 0);
    const MemoryPlan& plan = context_.memory_plan();
    const RegionPeaks peaks = context_.region_peaks();
    ASSERT_EQ(std::ssize(peaks.slot_bytes), kSlots);
    for (const std::int64_t bytes : peaks.slot_bytes) EXPECT_LE(bytes, plan.slot_bytes);
    EXPECT_LE(peaks.device_scratch_bytes, plan.device_scratch_bytes);
    EXPECT_EQ(peaks.host_scratch_bytes, 0);
  }

  void backward(std::size_t slot) {
    Live& top = stacks_[slot].back();
    const RankCall call = pack_rank(problem_, {}, top.counts, communicator_->rank());
    call_backward(context_, std::move(top.saved), call);
    EXPECT_FALSE(top.saved.is_live());
    stacks_[slot].pop_back();
  }

  const MoeProblem& problem_;
  std::vector<BF16> expected_;
  int ranks_;
  std::shared_ptr<Communicator> communicator_;
  Context context_;
  std::mt19937_64 random_;
  struct Live {
    SavedForward saved;
    TokenCounts counts;
  };
  std::vector<std::vector<Live>> stacks_;
};

TEST_P(Saving, RandomSchedulesDecideAlikeStayInBoundsAndReturnToTheStart) {
  const MoeCase& moe_case = GetParam();
  const MoeProblem problem = problem_of(moe_case, RoutePattern::kMixed, 304);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    SlotWalk walk(moe_case, problem, communicator, 305);
    walk.run_steps(60);
    EXPECT_GT(walk.num_saved, 0);
    EXPECT_GT(walk.num_recomputed, 0);
  });
}

TEST_P(Saving, BalancedRoutingIsSavedWholeWithAFactorOfOne) {
  const MoeCase& moe_case = GetParam();
  const MoeShape shape{.num_tokens = kTokens * moe_case.ranks,
                       .hidden_dim = 22,
                       .intermediate_dim = 18,
                       .num_experts = 3 * moe_case.ranks,
                       .top_k = 3};
  MoeProblem problem = make_problem(fit(shape, moe_case), RoutePattern::kDistinct, 306);
  for (std::size_t route = 0; route < problem.ids.size(); ++route) {
    problem.ids[route] = static_cast<std::int64_t>(route) % problem.shape.num_experts;
  }
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Config config = slots_config(problem, moe_case, 1.0);
    config.max_tokens = kTokens;
    Context context = make_context(config, moe_case, communicator);
    const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
    std::vector<SavedForward> saved;
    for (std::int64_t slot = 0; slot < kSlots; ++slot) {
      context.select_activation_slot(slot, kLayers);
      for (std::int64_t layer = 0; layer < kLayers; ++layer) {
        saved.push_back(call_saving(context, call));
        EXPECT_FALSE(context.last_call().is_recomputed) << "slot " << slot << ", layer " << layer;
      }
      EXPECT_LE(context.region_peaks().slot_bytes[static_cast<std::size_t>(slot)],
                context.memory_plan().slot_bytes);
    }
  });
}

TEST_P(Saving, AFullSlotIsRefusedOnEveryRankAndChangesNothing) {
  const MoeCase& moe_case = GetParam();
  const MoeProblem problem = problem_of(moe_case, RoutePattern::kMixed, 307);
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(slots_config(problem, moe_case, 1.0), moe_case, communicator);
    const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
    context.select_activation_slot(1, 1);
    const SavedForward saved = call_saving(context, call);
    const RegionPeaks peaks = context.region_peaks();
    const RankCall refused = pack_rank(problem, {}, counts, communicator->rank());
    expect_error(saving_outcome(context, refused), ErrorCode::kInvalidArgument,
                 {"activation slot 1 holds 1 forward(s)", "selected for 1"});
    EXPECT_TRUE(refused.is_y_untouched());
    EXPECT_EQ(context.region_peaks().slot_bytes, peaks.slot_bytes);
    EXPECT_TRUE(saved.is_live());
    context.select_activation_slot(0, 1);
    EXPECT_TRUE(call_saving(context, call).is_live());
  });
}

TEST_P(Saving, AnUnusedSavedForwardMakesItsSlotNeedAReset) {
  const MoeCase& moe_case = GetParam();
  const MoeProblem problem = problem_of(moe_case, RoutePattern::kMixed, 308);
  on_every_rank(moe_case, problem, [&](Context& context, const RankCall& call) {
    SavedForward bottom = call_saving(context, call);
    {
      SavedForward top = call_saving(context, call);
      const SavedForward moved = std::move(top);
      EXPECT_TRUE(moved.is_live());
      EXPECT_FALSE(top.is_live());  // NOLINT(bugprone-use-after-move): what a move leaves
      EXPECT_EQ(top.slot(), -1);
    }
    expect_error(saving_outcome(context, call), ErrorCode::kInvalidArgument,
                 {"activation slot 0 needs reset()", "layer 1", "destroyed before its backward"});
    // Other slots and forwards without a backward go on.
    call_experts(context, call);
    context.select_activation_slot(2, 1);
    SavedForward other = call_saving(context, call);
    context.reset();
    EXPECT_FALSE(bottom.is_live());
    EXPECT_FALSE(other.is_live());
    EXPECT_EQ(context.selected_activation_slot(), 0);
    EXPECT_EQ(context.region_peaks().slot_bytes, std::vector<std::int64_t>(kSlots));
    expect_error(backward_outcome(context, bottom, call), ErrorCode::kInvalidArgument,
                 {"before a reset()"});
    // What is stale does no harm any more.
    other = call_saving(context, call);
    bottom = {};
    EXPECT_TRUE(other.is_live());
    call_backward(context, std::move(other), call);
  });
}

TEST_P(Saving, AFailedCallLeavesTheSlotsAsTheyWere) {
  const MoeCase& moe_case = GetParam();
  MoeProblem problem = problem_of(moe_case, RoutePattern::kDistinct, 309);
  MoeProblem crowded = problem;
  std::ranges::fill(crowded.ids, problem.shape.num_experts - 1);
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Config config = slots_config(problem, moe_case, 1.0);
    config.max_tokens = kTokens;
    config.device_scratch_capacity_factor = moe_case.ranks > 1 ? 1.9 : 0.5;
    Context context = make_context(config, moe_case, communicator);
    const RankCall bad = pack_rank(crowded, {}, counts, communicator->rank());
    expect_error(saving_outcome(context, bad), ErrorCode::kCapacityExceeded, {"required"});
    EXPECT_TRUE(bad.is_y_of_a_failed_call(moe_case.backend));
    EXPECT_EQ(context.region_peaks().slot_bytes, std::vector<std::int64_t>(kSlots));
    // Where the host did not wait, the slot does, for the backward of the failed call.
    if (!contract_of(moe_case).host_waits) return;
    const RankCall none = pack_rank(problem, {}, counts, communicator->rank());
    if (moe_case.ranks == 1) return;  // its plan has half the rows
    EXPECT_EQ(call_saving(context, none).slot_layer(), 0);
  });
}

TEST_P(SavingTogether, RanksThatSaveInDifferentPlacesAreToldSo) {
  const MoeCase& moe_case = GetParam();
  const MoeProblem problem = problem_of(moe_case, RoutePattern::kMixed, 310);
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  const std::function<void(Context&)> differences[] = {
      [](Context& context) { context.select_activation_slot(2, kLayers); },
      [](Context& context) { context.select_activation_slot(0, kLayers - 1); }};
  for (const auto& differ : differences) {
    run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
      Context context = make_context(slots_config(problem, moe_case, 1.0), moe_case, communicator);
      const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
      if (communicator->rank() == 1) differ(context);
      expect_error(saving_outcome(context, call), ErrorCode::kPeerMismatch,
                   {"rank", "saves in activation slot", "layer 0 of 3"});
      expect_error(saving_outcome(context, call), ErrorCode::kClosed, {"saves in"});
      EXPECT_TRUE(call.is_y_untouched());
    });
  }
}

TEST_P(SavingTogether, ASavingAndAPlainForwardDoNotMeet) {
  const MoeCase& moe_case = GetParam();
  const MoeProblem problem = problem_of(moe_case, RoutePattern::kMixed, 311);
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(slots_config(problem, moe_case, 1.0), moe_case, communicator);
    const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
    expect_error(outcome_of([&] {
                   if (communicator->rank() == 0) {
                     const SavedForward unused = call_saving(context, call);
                   } else {
                     call_experts(context, call);
                   }
                 }),
                 ErrorCode::kPeerMismatch, {"saving call 1", "is in call 1"});
  });
}

TEST_P(Saving, WhatIsDiscardedLeavesTheSlotAsItWas) {
  const MoeCase& moe_case = GetParam();
  const MoeProblem problem = problem_of(moe_case, RoutePattern::kMixed, 315);
  on_every_rank(moe_case, problem, [&](Context& context, const RankCall& call) {
    SavedForward bottom = call_saving(context, call);
    SavedForward top = call_saving(context, call);
    expect_error(outcome_of([&] { context.discard(std::move(bottom)); }),
                 ErrorCode::kInvalidArgument, {"is not the last one", "stack"});
    for (int repeat = 0; repeat < 2; ++repeat) {
      context.discard(std::move(top));
      EXPECT_FALSE(top.is_live());  // NOLINT(bugprone-use-after-move): of no forward
      expect_error(outcome_of([&] { context.discard(std::move(top)); }),
                   ErrorCode::kInvalidArgument, {"of no forward"});
      top = call_saving(context, call);
      EXPECT_EQ(top.slot_layer(), 1);
    }
    call_backward(context, std::move(top), call);
    call_backward(context, std::move(bottom), call);
  });
}

TEST_P(Saving, WhatCannotSaveSaysWhy) {
  MoeCase moe_case = GetParam();
  const MoeProblem problem = problem_of(moe_case, RoutePattern::kMixed, 312);
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
    Config config = slots_config(problem, moe_case, std::nullopt);
    config.inference = true;
    Context inference = make_context(config, moe_case, communicator);
    EXPECT_NO_THROW(inference.select_activation_slot(99, 99));
    expect_error(saving_outcome(inference, call), ErrorCode::kInvalidArgument,
                 {"no activation slots", "inference"});
    config = slots_config(problem, moe_case, 1.0);
    config.combine = Combine::kPerRank;
    Context per_rank = make_context(config, moe_case, communicator);
    expect_error(saving_outcome(per_rank, call), ErrorCode::kUnsupported,
                 {"combine per_rank", "lean"});
    EXPECT_TRUE(call.is_y_untouched());
    call_experts(per_rank, call);
    config.activation_policy = ActivationPolicy::kLean;
    Context lean = make_context(config, moe_case, communicator);
    const std::vector<BF16> expected = call.y_rows();
    EXPECT_TRUE(call_saving(lean, call).is_live());
    EXPECT_EQ(first_difference(expected, call.y_rows(), problem.shape.hidden_dim), "");
  });
}

TEST(SavedForwardOfAContext, MayOutliveIt) {
  const MoeCase one;
  const MoeProblem problem = problem_of(one, RoutePattern::kMixed, 313);
  const RankCall call = pack_rank(problem, {}, {problem.shape.num_tokens}, 0);
  SavedForward saved;
  EXPECT_FALSE(saved.is_live());
  {
    Context context = make_context(slots_config(problem, one, 1.0), one, nullptr);
    saved = call_saving(context, call);
    SavedForward closed = call_saving(context, call);
    context.close();
    EXPECT_FALSE(closed.is_live());
    expect_error(outcome_of([&] { context.select_activation_slot(0, 1); }), ErrorCode::kClosed,
                 {"closed"});
    expect_error(outcome_of([&] { context.reset(); }), ErrorCode::kClosed, {"closed"});
  }
  EXPECT_FALSE(saved.is_live());
  EXPECT_EQ(saved.slot_layer(), 0);
}

TEST(SavedForwardOfAContext, BelongsToItAlone) {
  const MoeCase one;
  const MoeProblem problem = problem_of(one, RoutePattern::kMixed, 314);
  const RankCall call = pack_rank(problem, {}, {problem.shape.num_tokens}, 0);
  const Config config = slots_config(problem, one, 1.0);
  Context context = make_context(config, one, nullptr);
  Context other = make_context(config, one, nullptr);
  SavedForward bottom = call_saving(context, call);
  SavedForward top = call_saving(context, call);
  expect_error(backward_outcome(other, top, call), ErrorCode::kInvalidArgument,
               {"another context"});
  expect_error(backward_outcome(context, bottom, call), ErrorCode::kInvalidArgument,
               {"is not the last one", "stack"});
  SavedForward none;
  expect_error(backward_outcome(context, none, call), ErrorCode::kInvalidArgument,
               {"of no forward"});
  call_backward(context, std::move(top), call);
  expect_error(backward_outcome(context, top, call), ErrorCode::kInvalidArgument,
               {"had its backward already"});
  call_backward(context, std::move(bottom), call);
}

}  // namespace
}  // namespace distmoe::conformance
