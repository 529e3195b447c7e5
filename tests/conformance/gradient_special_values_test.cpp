// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a NaN reaches the gradients of its own token, routes and experts and no other bit,
// with either policy, activation and norm; what an earlier step left behind is never read; without
// a route everything is exactly zero.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <mutex>

#include "conformance/moe_gradients.hpp"

namespace distmoe::conformance {
namespace {

class GradientSpecialValues : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, GradientSpecialValues, testing::ValuesIn(training_cases()),
                         case_name);

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr MoeShape kShape{
    .num_tokens = 23, .hidden_dim = 24, .intermediate_dim = 16, .num_experts = 9, .top_k = 3};

/// A way through the backward: policy, norm, activation, saved or computed again.
struct Way {
  std::string name;
  BackwardForm form;
  Activation activation = Activation::kSwiGLU;
};

std::vector<Way> all_ways() {
  std::vector<Way> ways;
  for (const std::optional<double> factor : {std::optional<double>(), std::optional(4.0)}) {
    const std::string kept = factor ? ", saved" : ", recomputed";
    const BackwardForm lean{.policy = ActivationPolicy::kLean, .slot_factor = factor};
    BackwardForm norm{.slot_factor = factor};
    norm.options.norm = PostExpertNorm{.eps = 1e-5};
    ways.push_back({"full" + kept, {.slot_factor = factor}});
    ways.push_back({"clamped" + kept, {.slot_factor = factor}, Activation::kSwiGLUClamped});
    ways.push_back({"lean" + kept, lean});
    ways.push_back({"lean, clamped" + kept, lean, Activation::kSwiGLUClamped});
    ways.push_back({"norm" + kept, norm});
  }
  return ways;
}

MoeProblem problem_of(const Way& way, RoutePattern pattern, std::uint64_t seed) {
  MoeProblem problem = make_problem_with_biases(kShape, pattern, seed);
  problem.activation = way.activation;
  problem.limit = 2.0;
  return problem;
}

/// Of values in blocks of `size`: a poisoned block has a NaN, another has the clean bits.
void expect_poison(const std::vector<float>& clean, const std::vector<float>& actual,
                   std::int64_t size, const std::vector<bool>& poisoned, const char* name) {
  ASSERT_EQ(clean.size(), actual.size()) << name;
  ASSERT_EQ(std::ssize(actual), std::ssize(poisoned) * size) << name;
  for (std::int64_t block = 0; block < std::ssize(poisoned); ++block) {
    const bool is_poisoned = poisoned[static_cast<std::size_t>(block)];
    const auto begin = actual.begin() + block * size;
    const bool has_nan =
        std::any_of(begin, begin + size, [](float value) { return std::isnan(value); });
    EXPECT_EQ(has_nan, is_poisoned) << name << ", block " << block;
    if (is_poisoned) continue;
    EXPECT_TRUE(std::equal(begin, begin + size, clean.begin() + block * size))
        << name << ", block " << block;
  }
}

/// What poisoned routes reach: their own tokens and experts.
struct Poison {
  Poison(const MoeProblem& problem, const std::function<bool(std::size_t route)>& is_poisoned)
      : tokens(static_cast<std::size_t>(problem.shape.num_tokens)),
        routes(problem.ids.size()),
        experts(static_cast<std::size_t>(problem.shape.num_experts)) {
    for (std::size_t route = 0; route < routes.size(); ++route) {
      if (problem.ids[route] < 0 || !is_poisoned(route)) continue;
      tokens[route / static_cast<std::size_t>(problem.shape.top_k)] = true;
      routes[route] = true;
      experts[static_cast<std::size_t>(problem.ids[route])] = true;
    }
  }

  std::vector<bool> tokens, routes, experts;
  /// bias2 sums grad_h3, which is dy * score but for a norm, so that NaN of before h3 stays away.
  bool is_in_grad_h3 = true;
};

void expect_poison(const GradientValues& clean, const GradientValues& actual,
                   const Poison& poison) {
  const std::int64_t d = kShape.hidden_dim;
  const std::int64_t f = kShape.intermediate_dim;
  expect_poison(clean.x, actual.x, d, poison.tokens, "grad_x");
  expect_poison(clean.scores, actual.scores, 1, poison.routes, "grad_scores");
  expect_poison(clean.gate, actual.gate, f * d, poison.experts, "grad of gate");
  expect_poison(clean.up, actual.up, f * d, poison.experts, "grad of up");
  expect_poison(clean.down, actual.down, d * f, poison.experts, "grad of w2");
  expect_poison(clean.gate_bias, actual.gate_bias, f, poison.experts, "grad of the gate's bias");
  expect_poison(clean.up_bias, actual.up_bias, f, poison.experts, "grad of the up's bias");
  expect_poison(clean.down_bias, actual.down_bias, d,
                poison.is_in_grad_h3 ? poison.experts : std::vector<bool>(poison.experts.size()),
                "grad of bias2");
}

/// Rows of experts lie side by side: a sum over the rows of one stops at its last.
// reports: A63
TEST_P(GradientSpecialValues, ANaNTokenStaysWithItsRowAndExperts) {
  constexpr std::int64_t kToken = 11;
  for (const Way& way : all_ways()) {
    SCOPED_TRACE(way.name);
    const MoeProblem problem = problem_of(way, RoutePattern::kDistinct, 750);
    const std::vector<BF16> dy = make_dy(problem, 752);
    const GradientValues clean = run_backward(problem, dy, GetParam(), way.form);
    Poison poison(problem, [](std::size_t route) { return route / kShape.top_k == kToken; });
    for (const bool in_x : {true, false}) {
      SCOPED_TRACE(in_x ? "in x" : "in dy");
      poison.is_in_grad_h3 = !in_x || way.form.options.norm;
      MoeProblem poisoned = problem;
      std::vector<BF16> poisoned_dy = dy;
      (in_x ? poisoned.x : poisoned_dy)[kToken * kShape.hidden_dim + 3] = to_bf16(kNaN);
      expect_poison(clean, run_backward(poisoned, poisoned_dy, GetParam(), way.form), poison);
    }
  }
}

// reports: A60
TEST_P(GradientSpecialValues, NaNWeightsStayWithTheirExpertAndItsTokens) {
  constexpr std::int64_t kSick = 5;
  for (const Way& way : all_ways()) {
    SCOPED_TRACE(way.name);
    const MoeProblem problem = problem_of(way, RoutePattern::kMixed, 753);
    const std::vector<BF16> dy = make_dy(problem, 755);
    const GradientValues clean = run_backward(problem, dy, GetParam(), way.form);
    Poison poison(problem, [&](std::size_t route) { return problem.ids[route] == kSick; });
    ASSERT_TRUE(poison.experts[kSick]) << "no route is poisoned";
    poison.is_in_grad_h3 = way.form.options.norm.has_value();
    const auto matrix = static_cast<std::ptrdiff_t>(kShape.intermediate_dim * kShape.hidden_dim);
    MoeProblem poisoned = problem;
    std::fill_n(poisoned.gate.begin() + kSick * matrix, matrix, to_bf16(kNaN));
    expect_poison(clean, run_backward(poisoned, dy, GetParam(), way.form), poison);
  }
}

/// A saving forward and its backward.
void train(Context& context, const MoeProblem& problem, const BackwardForm& form,
           const TokenCounts& counts, const RankGradients& gradients) {
  const RankCall call = pack_rank(problem, {}, counts, context.rank());
  call_backward(context, call_saving(context, call, form.options), call, gradients);
}

/// Scratch, slots, staging and the workspaces of threads hold what a larger step of NaN, infinite
/// or huge values left there.
// reports: A13, A42, A58, A85
TEST_P(GradientSpecialValues, WhatAnEarlierStepLeftBehindIsNeverRead) {
  for (const Way& way : all_ways()) {
    SCOPED_TRACE(way.name);
    MoeProblem large = problem_of(way, RoutePattern::kDistinct, 756);
    MoeProblem small = large;
    small.shape.num_tokens = 6;
    const std::vector<BF16> dy = make_dy(large, 758);
    const GradientValues expected = run_backward(small, dy, single_rank_of(GetParam()), way.form);
    const TokenCounts large_counts = even_split(kShape.num_tokens, GetParam().ranks);
    const TokenCounts small_counts = ragged_split(6, GetParam().ranks, 2);
    for (const float left : {kNaN, std::numeric_limits<float>::infinity(), 1e30F}) {
      std::ranges::fill(large.x, to_bf16(left));
      const std::vector<BF16> left_dy(dy.size(), to_bf16(left));
      GradientValues actual(small);
      std::mutex mutex;
      run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
        Context context =
            make_context(training_config(large, GetParam(), way.form, kShape.num_tokens),
                         GetParam(), communicator);
        train(context, large, way.form, large_counts,
              RankGradients(large, left_dy, way.form, large_counts, communicator->rank()));
        const RankGradients gradients(small, dy, way.form, small_counts, communicator->rank());
        train(context, small, way.form, small_counts, gradients);
        const std::scoped_lock lock(mutex);
        gradients.copy_to(actual);
      });
      EXPECT_EQ(first_difference(expected, actual), "") << "left behind: " << left;
    }
  }
}

// reports: A27: no route at all, with tokens on every rank.
TEST_P(GradientSpecialValues, WithoutAnyRouteAreExactlyZero) {
  for (const Way& way : all_ways()) {
    SCOPED_TRACE(way.name);
    MoeProblem problem = problem_of(way, RoutePattern::kAllDisabled, 759);
    std::ranges::fill(problem.scores, kNaN);
    const std::vector<BF16> dy = make_dy(problem, 760);
    EXPECT_EQ(
        first_difference(GradientValues(problem), run_backward(problem, dy, GetParam(), way.form)),
        "");
    BackwardForm added = way.form;
    added.accumulates = true;
    added.initial = -0.5;
    const GradientValues actual = run_backward(problem, dy, GetParam(), added);
    for (const auto* values : {&actual.gate, &actual.up, &actual.down, &actual.gate_bias,
                               &actual.up_bias, &actual.down_bias}) {
      EXPECT_TRUE(std::ranges::all_of(*values, [](float value) { return value == -0.5F; }));
    }
  }
}

/// What FP32 addition says of a subnormal number that is added to, and of a sum that is one, not
/// zero. The products themselves stay normal: instructions of processors flush smaller ones.
TEST_P(GradientSpecialValues, SubnormalSumsAreKept) {
  for (const Way& way : all_ways()) {
    SCOPED_TRACE(way.name);
    const MoeProblem problem = problem_of(way, RoutePattern::kDistinct, 761);
    std::vector<BF16> dy = make_dy(problem, 762);
    // Gradients of about 1e-37; the least normal number is 1.2e-38.
    for (BF16& value : dy) value = to_bf16(to_float(value) * 1e-36F);
    BackwardForm fresh_form = way.form;
    fresh_form.wgrad_dtype = DType::kF32;
    const GradientValues fresh = run_backward(problem, dy, GetParam(), fresh_form);
    int num_subnormal_sums = 0;
    for (const float initial : {3e-39F, -2e-38F}) {
      BackwardForm added_form = fresh_form;
      added_form.accumulates = true;
      added_form.initial = initial;
      const GradientValues added = run_backward(problem, dy, GetParam(), added_form);
      for (const auto member :
           {&GradientValues::gate, &GradientValues::up, &GradientValues::down}) {
        const std::vector<float>& values = fresh.*member;
        for (std::size_t i = 0; i < values.size(); ++i) {
          ASSERT_EQ((added.*member)[i], values[i] + initial) << "at " << i << ", " << values[i];
          if (values[i] != 0.0F && std::fpclassify(values[i] + initial) == FP_SUBNORMAL) {
            ++num_subnormal_sums;
          }
        }
      }
    }
    EXPECT_GT(num_subnormal_sums, 0);
  }
}

}  // namespace
}  // namespace distmoe::conformance
