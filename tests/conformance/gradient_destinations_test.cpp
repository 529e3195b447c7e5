// SPDX-License-Identifier: Apache-2.0
//
// Invariant: every gradient goes where its own destination says, or nowhere, whatever the others
// do: asked for alone or together, overwritten or added to, at any address. Nothing else is
// written.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <functional>
#include <mutex>

#include "conformance/moe_gradients.hpp"

namespace distmoe::conformance {
namespace {

class GradientDestinations : public testing::TestWithParam<MoeCase> {};
INSTANTIATE_TEST_SUITE_P(Laws, GradientDestinations, testing::ValuesIn(training_cases()),
                         case_name);

constexpr double kInitial = 0.75;

MoeProblem problem_with_an_idle_expert(std::uint64_t seed) {
  MoeProblem problem = make_problem_with_biases(
      {.num_tokens = 14, .hidden_dim = 18, .intermediate_dim = 10, .num_experts = 5, .top_k = 2},
      RoutePattern::kDistinct, seed);
  for (std::int64_t& id : problem.ids) id = id == 3 ? -1 : id;
  problem.round_scores();
  return problem;
}

/// A backward whose destinations `choose` changes. What a destination that is not given holds stays
/// in its values.
GradientValues run_with(const MoeProblem& problem, const std::vector<BF16>& dy,
                        const MoeCase& moe_case, const BackwardForm& form,
                        const std::function<void(RoutedGradients&)>& choose) {
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  GradientValues result(problem);
  std::mutex mutex;
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(training_config(problem, moe_case, form, counts.back()),
                                   moe_case, communicator);
    const RankCall call = pack_rank(problem, form.call, counts, communicator->rank());
    const RankGradients gradients(problem, dy, form, counts, communicator->rank());
    RoutedGradients destinations = gradients.destinations();
    choose(destinations);
    routed_experts_backward(context, call_saving(context, call), gradients.dy(), call.weights,
                            destinations);
    const std::scoped_lock lock(mutex);
    gradients.copy_to(result);
  });
  return result;
}

/// One destination, and the values that it fills.
struct Destination {
  std::function<void(RoutedGradients&)> forget;
  std::function<void(RoutedGradients&, bool)> accumulate;  ///< none: x and scores
  std::vector<std::vector<float> GradientValues::*> values;
};

Destination of_weight(WeightGradient RoutedGradients::*member,
                      std::vector<std::vector<float> GradientValues::*> values) {
  return {[member](RoutedGradients& g) { g.*member = {}; },
          [member](RoutedGradients& g, bool on) { (g.*member).accumulates = on; },
          std::move(values)};
}

std::array<Destination, 6> all_destinations() {
  return {
      Destination{[](RoutedGradients& g) { g.grad_x_TD = {}; }, {}, {&GradientValues::x}},
      Destination{[](RoutedGradients& g) { g.grad_scores_TK = {}; }, {}, {&GradientValues::scores}},
      of_weight(&RoutedGradients::grad_w13_L2FD, {&GradientValues::gate, &GradientValues::up}),
      of_weight(&RoutedGradients::grad_w2_LDF, {&GradientValues::down}),
      of_weight(&RoutedGradients::grad_bias13_L2F,
                {&GradientValues::gate_bias, &GradientValues::up_bias}),
      of_weight(&RoutedGradients::grad_bias2_LD, {&GradientValues::down_bias})};
}

// reports: A111: each of them alone, each of them left out, and none at all.
TEST_P(GradientDestinations, WhatIsNotAskedForChangesNothingElse) {
  const MoeProblem problem = problem_with_an_idle_expert(740);
  const std::vector<BF16> dy = make_dy(problem, 741);
  const std::array<Destination, 6> all = all_destinations();
  for (const ActivationPolicy policy : {ActivationPolicy::kFull, ActivationPolicy::kLean}) {
    const BackwardForm form{.policy = policy, .slot_factor = 4.0};
    const GradientValues complete = run_backward(problem, dy, {}, form);
    const GradientValues untouched =
        run_with(problem, dy, GetParam(), form, [](RoutedGradients& g) { g = {}; });
    for (unsigned asked = 0; asked < 1U << all.size(); ++asked) {
      const auto num_asked = static_cast<std::size_t>(std::popcount(asked));
      if (num_asked > 1 && num_asked + 1 < all.size()) continue;
      GradientValues expected = untouched;
      for (std::size_t i = 0; i < all.size(); ++i) {
        for (const auto member : all[i].values) {
          if ((asked >> i & 1U) != 0) expected.*member = complete.*member;
        }
      }
      const GradientValues actual =
          run_with(problem, dy, GetParam(), form, [&](RoutedGradients& g) {
            for (std::size_t i = 0; i < all.size(); ++i) {
              if ((asked >> i & 1U) == 0) all[i].forget(g);
            }
          });
      EXPECT_EQ(first_difference(expected, actual), "") << "asked for " << asked;
    }
  }
}

// reports: A111: one projection is added to while another is overwritten, in every combination.
TEST_P(GradientDestinations, EachIsAddedToOrOverwrittenByItself) {
  const MoeProblem problem = problem_with_an_idle_expert(742);
  const std::vector<BF16> dy = make_dy(problem, 743);
  const GradientValues fresh = run_backward(problem, dy, {});
  const std::array<Destination, 6> all = all_destinations();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const BackwardForm form{.wgrad_dtype = dtype, .accumulates = true, .initial = kInitial};
    for (unsigned added = 0; added < 16; ++added) {
      const auto is_added = [&](std::size_t i) { return (added >> (i - 2) & 1U) != 0; };
      GradientValues expected = fresh;
      for (std::size_t i = 2; i < all.size(); ++i) {
        for (const auto member : all[i].values) {
          for (float& value : expected.*member) {
            if (is_added(i)) value += static_cast<float>(kInitial);
            if (dtype == DType::kBF16) value = to_float(to_bf16(value));
          }
        }
      }
      const GradientValues actual =
          run_with(problem, dy, GetParam(), form, [&](RoutedGradients& g) {
            for (std::size_t i = 2; i < all.size(); ++i) all[i].accumulate(g, is_added(i));
          });
      EXPECT_EQ(first_difference(expected, actual), "") << "added to " << added;
    }
  }
}

// reports: A38: dy = buf[1:] and every destination likewise, aligned to its element only.
TEST_P(GradientDestinations, OneElementOffHaveTheSameBits) {
  const MoeProblem problem = problem_with_an_idle_expert(744);
  const std::vector<BF16> dy = make_dy(problem, 745);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool accumulates : {false, true}) {
      for (const bool is_strided : {false, true}) {
        BackwardForm form{.call = {.score_dtype = DType::kBF16, .is_strided = is_strided},
                          .wgrad_dtype = dtype,
                          .accumulates = accumulates,
                          .initial = kInitial};
        const GradientValues expected = run_backward(problem, dy, GetParam(), form);
        form.is_one_element_off = true;
        EXPECT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), form)), "");
      }
    }
  }
}

}  // namespace
}  // namespace distmoe::conformance
