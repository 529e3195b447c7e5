// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a backward gives the gradients of its own forward, whatever happened since: other
// layers in the same slot, other slots selected, calls without a backward, ids, scores and x
// changed in place; and it takes no memory beyond the plan.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "conformance/moe_gradients.hpp"
#include "conformance/moe_refusal.hpp"

namespace distmoe::conformance {
namespace {

class BackwardSlots : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, BackwardSlots, testing::ValuesIn(training_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Coded, BackwardSlots, testing::ValuesIn(coded_training_cases()),
                         case_name);

constexpr std::int64_t kTokens = 12;
constexpr std::int64_t kSlots = 3;
constexpr std::int64_t kLayers = 3;
constexpr int kNumLayers = 4;

/// Layers of one model: the same sizes, other weights, tokens and routes.
struct Layers {
  std::vector<MoeProblem> problems;
  std::vector<std::vector<BF16>> dy;
  std::vector<GradientValues> expected;  ///< of one rank that recomputes

  Layers(const MoeCase& moe_case, ActivationPolicy policy) {
    for (std::uint64_t layer = 0; layer < kNumLayers; ++layer) {
      const MoeShape shape{.num_tokens = kTokens,
                           .hidden_dim = 22,
                           .intermediate_dim = 18,
                           .num_experts = 7,
                           .top_k = 3};
      problems.push_back(make_problem(fit(shape, moe_case), RoutePattern::kMixed, 440 + layer));
      dy.push_back(make_dy(problems.back(), 450 + layer));
    }
    for (std::size_t layer = 0; layer < kNumLayers; ++layer) {
      expected.push_back(
          run_backward(problems[layer], dy[layer], single_rank_of(moe_case), {.policy = policy}));
    }
  }
};

/// Compares the part of a rank.
void expect_part(const GradientValues& expected, const RankGradients& gradients) {
  GradientValues actual = expected;
  gradients.copy_to(actual);
  EXPECT_EQ(first_difference(expected, actual), "");
}

/// A rank's walk over slots and layers; every rank draws the same numbers.
class TrainingWalk {
 public:
  TrainingWalk(const MoeCase& moe_case, const Layers& layers, const BackwardForm& form,
               const std::shared_ptr<Communicator>& communicator)
      : layers_(layers),
        form_(form),
        ranks_(moe_case.ranks),
        rank_(communicator->rank()),
        context_(make_context(config_of_walk(moe_case, layers, form), moe_case, communicator)),
        random_(460),
        stacks_(kSlots) {}

  void run_steps(int steps) {
    for (int i = 0; i < steps && !testing::Test::HasFailure(); ++i) step();
    for (auto& stack : stacks_) {
      while (!stack.empty()) backward(stack);
    }
    const MemoryPlan& plan = context_.memory_plan();
    const RegionPeaks peaks = context_.region_peaks();
    EXPECT_LE(peaks.device_scratch_bytes, plan.device_scratch_bytes);
    EXPECT_EQ(peaks.host_scratch_bytes, 0);
    for (const std::int64_t bytes : peaks.slot_bytes) EXPECT_LE(bytes, plan.slot_bytes);
    EXPECT_EQ(context_.allocated_bytes(), plan.allocated_bytes);
  }
  int num_recomputed = 0;
  int num_saved = 0;

 private:
  struct Live {
    SavedForward saved;
    std::size_t layer;
    TokenCounts counts;
    RankCall call;
  };

  static Config config_of_walk(const MoeCase& moe_case, const Layers& layers,
                               const BackwardForm& form) {
    Config config = training_config(layers.problems[0], moe_case, form, kTokens);
    config.max_moe_layers_per_activation_slot = kLayers;
    config.num_activation_slots = kSlots;
    return config;
  }

  std::size_t pick(std::size_t end) { return random_() % end; }

  void step() {
    auto& stack = stacks_[pick(kSlots)];
    if (!stack.empty() && (stack.size() == kLayers || pick(5) < 2)) return backward(stack);
    if (pick(4) == 0) return forward_only();
    context_.select_activation_slot(&stack - stacks_.data(), kLayers);
    forward(stack);
  }

  void forward_only() {
    const std::size_t layer = pick(kNumLayers);
    const TokenCounts counts = ragged_split(kTokens, ranks_, random_());
    const RankCall call = pack_rank(layers_.problems[layer], {}, counts, rank_);
    call_experts(context_, call);
  }

  void forward(std::vector<Live>& stack) {
    const std::size_t layer = pick(kNumLayers);
    TokenCounts counts = ragged_split(kTokens, ranks_, random_());
    RankCall call = pack_rank(layers_.problems[layer], {}, counts, rank_);
    SavedForward saved = call_saving(context_, call);
    ++(context_.last_call().is_recomputed ? num_recomputed : num_saved);
    // What the caller brought is the caller's again.
    call.x.poison();
    call.ids.poison();
    call.scores.poison();
    stack.push_back({std::move(saved), layer, std::move(counts), std::move(call)});
  }

  void backward(std::vector<Live>& stack) {
    Live& live = stack.back();
    const std::int64_t slot = live.saved.slot();
    const RankGradients gradients(layers_.problems[live.layer], layers_.dy[live.layer], form_,
                                  live.counts, rank_);
    call_backward(context_, std::move(live.saved), live.call, gradients);
    EXPECT_EQ(context_.last_call().slot, slot);
    expect_part(layers_.expected[live.layer], gradients);
    stack.pop_back();
  }

  const Layers& layers_;
  BackwardForm form_;
  int ranks_;
  int rank_;
  Context context_;
  std::mt19937_64 random_;
  std::vector<std::vector<Live>> stacks_;
};

TEST_P(BackwardSlots, EveryScheduleGivesTheGradientsOfItsForwards) {
  for (const ActivationPolicy policy : policies_of(GetParam())) {
    const Layers layers(GetParam(), policy);
    // Room for some layers of the fullest ranks; the padding of experts is in every plan.
    const bool has_padding = GetParam().precision != Precision::kBF16;
    const BackwardForm form{.policy = policy,
                            .slot_factor = has_padding ? 0.5 : 0.8 / (GetParam().ranks + 2)};
    run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
      TrainingWalk walk(GetParam(), layers, form, communicator);
      walk.run_steps(60);
      EXPECT_GT(walk.num_saved, 0);
      EXPECT_GT(walk.num_recomputed, 0);
    });
  }
}

/// Ids on the caller's side change between forward and backward.
TEST_P(BackwardSlots, IdsChangedInPlaceChangeNothing) {
  const Layers layers(GetParam(), ActivationPolicy::kFull);
  const MoeProblem& problem = layers.problems[0];
  const TokenCounts counts = even_split(kTokens, GetParam().ranks);
  for (const std::optional<double> factor : {std::optional<double>(), std::optional(4.0)}) {
    const BackwardForm form{.slot_factor = factor};
    run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
      Context context = make_context(training_config(problem, GetParam(), form, kTokens),
                                     GetParam(), communicator);
      RankCall call = pack_rank(problem, {}, counts, communicator->rank());
      SavedForward saved = call_saving(context, call);
      EXPECT_EQ(context.last_call().is_recomputed, !factor);
      auto* ids = static_cast<std::int32_t*>(call.ids.view().data);
      for (std::int64_t i = 0; i < call.ids.view().num_elements(); ++i)
        ids[i] = i % 2 == 0 ? -1 : 0;
      const RankGradients gradients(problem, layers.dy[0], form, counts, communicator->rank());
      call_backward(context, std::move(saved), call, gradients);
      expect_part(layers.expected[0], gradients);
    });
  }
}

}  // namespace
}  // namespace distmoe::conformance
