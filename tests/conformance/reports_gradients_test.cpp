// SPDX-License-Identifier: Apache-2.0
//
// Invariant: what public reports say of gradients, accumulation and experts without rows does not
// happen here. Each case reduces a report to values that can be computed by hand.
#include <gtest/gtest.h>

#include <cmath>

#include "conformance/moe_gradients.hpp"

namespace distmoe::conformance {
namespace {

class ReportedGradients : public testing::TestWithParam<MoeCase> {};
INSTANTIATE_TEST_SUITE_P(Laws, ReportedGradients, testing::ValuesIn(training_cases()), case_name);

constexpr MoeShape kWidths{.hidden_dim = 16, .intermediate_dim = 12};

float block_maximum(const std::vector<float>& values, std::int64_t block, std::int64_t size) {
  float most = 0.0F;
  for (std::int64_t i = block * size; i < (block + 1) * size; ++i) {
    const float value = std::abs(values[static_cast<std::size_t>(i)]);
    most = std::isnan(value) ? value : std::max(most, value);
  }
  return most;
}

// reports: A07, A08, A11, A39, A114: destinations hold NaN at first.
TEST_P(ReportedGradients, OfExpertsWithoutRowsAreExactlyZero) {
  for (const std::vector<int>& counts : std::vector<std::vector<int>>{
           {5, 0, 3, 0}, {0, 0, 0, 0}, {162, 0, 257, 46, 0, 83}, {4, 0}, {5, 27, 33, 1}}) {
    MoeProblem problem = problem_of_counts(counts, kWidths, 480);
    add_biases(problem, 481);
    const std::vector<BF16> dy = make_dy(problem, 482);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const GradientValues actual = run_backward(problem, dy, GetParam(), {.wgrad_dtype = dtype});
      for (std::int64_t expert = 0; expert < std::ssize(counts); ++expert) {
        const bool is_empty = counts[static_cast<std::size_t>(expert)] == 0;
        for (const float most : {block_maximum(actual.gate, expert, 16 * 12),
                                 block_maximum(actual.up, expert, 16 * 12),
                                 block_maximum(actual.down, expert, 16 * 12),
                                 block_maximum(actual.gate_bias, expert, 12),
                                 block_maximum(actual.up_bias, expert, 12),
                                 block_maximum(actual.down_bias, expert, 16)}) {
          EXPECT_EQ(most == 0.0F, is_empty) << "expert " << expert << ": " << most;
          EXPECT_TRUE(std::isfinite(most));
        }
      }
    }
    EXPECT_EQ(first_violation(problem, run_backward(problem, dy, GetParam()),
                              gradient_oracle(problem, dy, Rounding::kContract), 1e-3),
              "");
  }
}

// reports: A10: every pattern of four experts with and without rows.
TEST_P(ReportedGradients, OfEveryPatternOfExpertsWithoutRowsKeepToTheContract) {
  for (unsigned pattern = 0; pattern < 16; ++pattern) {
    std::vector<int> counts;
    for (unsigned expert = 0; expert < 4; ++expert) {
      counts.push_back((pattern >> expert & 1U) != 0 ? 8 : 0);
    }
    MoeProblem problem = problem_of_counts(counts, kWidths, 520 + pattern);
    add_biases(problem, 540);
    const std::vector<BF16> dy = make_dy(problem, 541);
    const GradientValues actual = run_backward(problem, dy, GetParam());
    EXPECT_EQ(
        first_violation(problem, actual, gradient_oracle(problem, dy, Rounding::kContract), 1e-3),
        "")
        << "pattern " << pattern;
    for (std::int64_t expert = 0; expert < 4; ++expert) {
      const bool is_empty = counts[static_cast<std::size_t>(expert)] == 0;
      EXPECT_EQ(block_maximum(actual.gate, expert, 16 * 12) == 0.0F, is_empty);
      EXPECT_EQ(block_maximum(actual.down, expert, 16 * 12) == 0.0F, is_empty);
    }
  }
}

// reports: A01, A02, A114: ranks without tokens, experts or rows take part.
TEST_P(ReportedGradients, IdleRanksGetZerosOfFullShape) {
  // All tokens are the last rank's and all routes the first expert's.
  MoeProblem problem = problem_of_counts({9, 0, 0}, kWidths, 483);
  const std::vector<BF16> dy = make_dy(problem, 484);
  TokenCounts counts(static_cast<std::size_t>(GetParam().ranks));
  counts.back() = 9;
  const GradientValues expected = run_backward(problem, dy, {});
  EXPECT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), counts)), "");
}

TEST_P(ReportedGradients, WithoutAnyTokenAreZeros) {
  MoeProblem problem = problem_of_counts({0, 0, 0}, kWidths, 485);
  const GradientValues actual = run_backward(problem, {}, GetParam());
  EXPECT_EQ(block_maximum(actual.gate, 0, std::ssize(actual.gate)), 0.0F);
  EXPECT_EQ(block_maximum(actual.down, 0, std::ssize(actual.down)), 0.0F);
}

// reports: A111: with accumulation on, the buffers of all weights change by exactly dW.
TEST_P(ReportedGradients, AccumulationAddsExactlyTheGradient) {
  MoeProblem problem = problem_of_counts({7, 0, 5, 3}, kWidths, 486);
  add_biases(problem, 487);
  const std::vector<BF16> dy = make_dy(problem, 488);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    // In FP32, so that only the sum is rounded to the type of the destination.
    GradientValues expected = run_backward(problem, dy, {});
    for (auto* values : {&expected.gate, &expected.up, &expected.down, &expected.gate_bias,
                         &expected.up_bias, &expected.down_bias}) {
      for (float& value : *values) {
        value += 0.75F;
        if (dtype == DType::kBF16) value = to_float(to_bf16(value));
      }
    }
    const BackwardForm form{.wgrad_dtype = dtype, .accumulates = true, .initial = 0.75};
    EXPECT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), form)), "");
  }
}

TEST(ReportedAccumulation, ThreeBackwardsIntoOneBufferGiveThreeGradients) {
  const MoeProblem problem = problem_of_counts({7, 0, 5, 3}, kWidths, 489);
  const std::vector<BF16> dy = make_dy(problem, 490);
  const GradientValues once = run_backward(problem, dy, {});
  const TokenCounts counts{15};
  const BackwardForm form{.accumulates = true};
  Context context = make_context(training_config(problem, {}, form, 15), {}, nullptr);
  const RankCall call = pack_rank(problem, {}, counts, 0);
  const RankGradients gradients(problem, dy, form, counts, 0);
  for (int i = 0; i < 3; ++i) {
    SavedForward saved = saving_routed_experts(context, call.input, call.weights, call.y_view());
    routed_experts_backward(context, std::move(saved), gradients.dy(), call.weights,
                            gradients.destinations());
  }
  GradientValues sum(problem);
  gradients.copy_to(sum);
  for (std::size_t i = 0; i < sum.down.size(); ++i) {
    EXPECT_EQ(sum.down[i], once.down[i] + once.down[i] + once.down[i]);
    EXPECT_EQ(sum.gate[i], once.gate[i] + once.gate[i] + once.gate[i]);
  }
}

/// D = F = 1: h1 = (gate, up), h3 = down * h2, all with x = 1.
struct ScalarLayer {
  MoeProblem problem;
  std::vector<BF16> dy;
};
ScalarLayer scalar_layer(double gate, double up, double down, std::int64_t top_k = 1) {
  ScalarLayer layer{make_constant_problem({.num_tokens = 1,
                                           .hidden_dim = 1,
                                           .intermediate_dim = 1,
                                           .num_experts = 2,
                                           .top_k = top_k},
                                          gate, up, down),
                    {to_bf16(1.0F)}};
  return layer;
}

// reports: A113: 256 + 1 is 257 in FP32, and 256 in BF16, as BF16 rounds it.
TEST(ReportedAccumulation, OfOneTo256KeepsTheOneInFP32) {
  // grad of down is dy * h2: choose h2 = 1 by up, dy = 1.
  ScalarLayer layer = scalar_layer(1.0, 1.0, 1.0);
  layer.problem.activation = Activation::kSwiGLU;
  layer.problem.gate.assign(2, to_bf16(64.0F));  // swish(64) = 64
  layer.problem.up.assign(2, to_bf16(0x1p-6F));
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const BackwardForm form{.wgrad_dtype = dtype, .accumulates = true, .initial = 256.0};
    const GradientValues actual = run_backward(layer.problem, layer.dy, {}, form);
    EXPECT_EQ(actual.down[0], dtype == DType::kF32 ? 257.0F : 256.0F);
    EXPECT_EQ(actual.down[1], 256.0F);  // no rows: untouched
  }
}

// reports: A19: one expert named twice counts twice; both scores get dot(dy, expert).
TEST_P(ReportedGradients, OfAnExpertNamedTwiceCountTwice) {
  MoeProblem problem = make_problem(
      {.num_tokens = 4, .hidden_dim = 12, .intermediate_dim = 8, .num_experts = 4, .top_k = 2},
      RoutePattern::kDistinct, 491);
  for (std::size_t token = 0; token < 4; ++token) {
    problem.ids[2 * token] = problem.ids[2 * token + 1] = 3;
    problem.scores[2 * token] = 0.625F;
    problem.scores[2 * token + 1] = 0.375F;
  }
  const std::vector<BF16> dy = make_dy(problem, 492);
  const GradientValues twice = run_backward(problem, dy, GetParam());
  MoeProblem single = problem;
  for (std::size_t token = 0; token < 4; ++token) {
    single.ids[2 * token + 1] = -1;
    single.scores[2 * token] = 1.0F;
  }
  const GradientValues once = run_backward(single, dy, GetParam());
  for (std::size_t token = 0; token < 4; ++token) {
    EXPECT_EQ(twice.scores[2 * token], twice.scores[2 * token + 1]);
    EXPECT_EQ(twice.scores[2 * token], once.scores[2 * token]);
    EXPECT_EQ(once.scores[2 * token + 1], 0.0F);
  }
  const GradientOracle oracle = gradient_oracle(single, dy, Rounding::kNone);
  EXPECT_LE(relative_error(twice.down, oracle.down), 6e-3);
  EXPECT_LE(relative_error(twice.gate, oracle.gate), 6e-3);
}

// reports: A24: the score's gradient of a disabled route is exactly 0, whatever the score holds.
TEST_P(ReportedGradients, OfDisabledRoutesAreZeroWhateverTheirScore) {
  MoeProblem problem = make_problem(
      {.num_tokens = 9, .hidden_dim = 12, .intermediate_dim = 8, .num_experts = 5, .top_k = 3},
      RoutePattern::kDistinct, 493);
  for (std::size_t route = 0; route < problem.ids.size(); route += 2) {
    problem.ids[route] = -1;
    problem.scores[route] = route % 4 == 0 ? NAN : INFINITY;
  }
  const std::vector<BF16> dy = make_dy(problem, 494);
  MoeProblem quiet = problem;
  for (std::size_t route = 0; route < problem.ids.size(); route += 2) quiet.scores[route] = 0.0F;
  for (const ActivationPolicy policy : {ActivationPolicy::kFull, ActivationPolicy::kLean}) {
    for (const std::optional<double> factor : {std::optional<double>(), std::optional(4.0)}) {
      const BackwardForm form{.policy = policy, .slot_factor = factor};
      const GradientValues actual = run_backward(problem, dy, GetParam(), form);
      EXPECT_EQ(first_difference(run_backward(quiet, dy, GetParam(), form), actual), "");
      for (std::size_t route = 0; route < problem.ids.size(); route += 2) {
        EXPECT_EQ(actual.scores[route], 0.0F);
        EXPECT_FALSE(std::signbit(actual.scores[route]));
      }
    }
  }
}

// reports: A51, A52, A107: K = 1 has a score gradient, dot(dy, expert), for local and remote
// experts.
TEST_P(ReportedGradients, OfASingleScoreAreTheExpertsAnswer) {
  const MoeProblem problem = problem_of_counts({3, 3, 3, 3}, kWidths, 495);
  const std::vector<BF16> dy = make_dy(problem, 496);
  const GradientValues actual = run_backward(problem, dy, GetParam());
  const GradientOracle oracle = gradient_oracle(problem, dy, Rounding::kNone);
  for (std::size_t token = 0; token < 12; ++token) {
    EXPECT_NE(actual.scores[token], 0.0F);
    EXPECT_NEAR(actual.scores[token], oracle.scores[token],
                0.02 * (1 + std::abs(oracle.scores[token])));
  }
}

// reports: A122: W = 0, b2 = 1: the gradient of bias2 is the sum of score * dy.
TEST_P(ReportedGradients, OfBias2AreWeightedByTheScore) {
  MoeProblem problem = make_constant_problem(
      {.num_tokens = 1, .hidden_dim = 4, .intermediate_dim = 2, .num_experts = 2, .top_k = 2}, 0.0,
      0.0, 0.0);
  problem.scores = {0.25F, 0.5F};
  problem.down_bias.assign(8, 1.0F);
  const std::vector<BF16> dy(4, to_bf16(2.0F));
  const GradientValues actual = run_backward(problem, dy, GetParam());
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(actual.down_bias[i], i < 4 ? 1.5F : 0.0F);
  for (const float value : actual.scores) EXPECT_EQ(value, 8.0F);
}

}  // namespace
}  // namespace distmoe::conformance
