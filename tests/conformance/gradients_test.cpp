// SPDX-License-Identifier: Apache-2.0
//
// Invariant: every gradient is that of the numerics contract: within 1e-3 (relative 2-norm) of its
// formulas with FP64 sums, and no further from the exact gradient than BF16 takes it; and how the
// same values are handed over changes no bit.
#include <gtest/gtest.h>

#include <cmath>

#include "conformance/moe_gradients.hpp"

namespace distmoe::conformance {
namespace {

constexpr double kRounding = 1e-3;  // of sums in FP32; one missing rounding to BF16 gives 1.6e-3
constexpr double kExact = 6e-3;

class Gradients : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, Gradients, testing::ValuesIn(training_cases()), case_name);

constexpr MoeShape kShape{
    .num_tokens = 37, .hidden_dim = 48, .intermediate_dim = 40, .num_experts = 13, .top_k = 4};

MoeProblem clamped(MoeProblem problem) {
  problem.activation = Activation::kSwiGLUClamped;
  problem.limit = 2.0;
  return problem;
}

void expect_right(const MoeProblem& problem, const std::vector<BF16>& dy,
                  const GradientValues& actual, bool is_lean = false) {
  EXPECT_EQ(first_violation(problem, actual,
                            gradient_oracle(problem, dy, Rounding::kContract, is_lean), kRounding),
            "");
  // The slope of a clamp jumps at its limit, where a rounding of h1 takes some elements across.
  if (problem.activation == Activation::kSwiGLUClamped) return;
  EXPECT_EQ(first_violation(problem, actual, gradient_oracle(problem, dy, Rounding::kNone), kExact),
            "");
}

TEST_P(Gradients, OfPlainSwigluKeepToTheContract) {
  const MoeProblem problem = make_problem(kShape, RoutePattern::kMixed, 401);
  const std::vector<BF16> dy = make_dy(problem, 402);
  for (const ActivationPolicy policy : {ActivationPolicy::kFull, ActivationPolicy::kLean}) {
    const BackwardForm form{.policy = policy, .slot_factor = 1.0};
    const bool is_lean = policy == ActivationPolicy::kLean;
    expect_right(problem, dy, run_backward(problem, dy, GetParam(), form), is_lean);
  }
}

TEST_P(Gradients, OfClampedSwigluWithBiasesKeepToTheContract) {
  MoeProblem problem = clamped(make_problem(kShape, RoutePattern::kMixed, 403));
  add_biases(problem, 404);
  const std::vector<BF16> dy = make_dy(problem, 405);
  const TokenCounts counts = ragged_split(kShape.num_tokens, GetParam().ranks, 4);
  for (const ActivationPolicy policy : {ActivationPolicy::kFull, ActivationPolicy::kLean}) {
    const BackwardForm form{.policy = policy};
    const bool is_lean = policy == ActivationPolicy::kLean;
    expect_right(problem, dy, run_backward(problem, dy, GetParam(), counts, form), is_lean);
  }
}

/// The contract's own error is that of a BF16 layer whose products sum exactly;
/// python/tests/test_gradient_errors.py has PyTorch's.
TEST_P(Gradients, OfRandomShapesAreAsExactAsBF16Allows) {
  for (std::uint64_t seed = 600; seed < 612; ++seed) {
    const auto pick = [&](std::uint64_t what, std::uint64_t low, std::uint64_t high) {
      return static_cast<std::int64_t>(low + mix(seed, what) % (high - low + 1));
    };
    const MoeShape shape{.num_tokens = pick(1, 20, 90),
                         .hidden_dim = pick(2, 8, 130),
                         .intermediate_dim = pick(3, 8, 130),
                         .num_experts = pick(4, 4, 12),
                         .top_k = pick(5, 1, 4)};
    MoeProblem problem = make_problem(fit(shape, GetParam()), RoutePattern::kDistinct, seed);
    if (seed % 2 == 0) add_biases(problem, seed + 50);
    const std::vector<BF16> dy = make_dy(problem, seed + 100);
    const GradientOracle exact = gradient_oracle(problem, dy, Rounding::kNone);
    for (const ActivationPolicy policy : {ActivationPolicy::kFull, ActivationPolicy::kLean}) {
      const bool is_lean = policy == ActivationPolicy::kLean;
      SCOPED_TRACE((is_lean ? "lean, seed " : "full, seed ") + std::to_string(seed));
      const GradientOracle contract = gradient_oracle(problem, dy, Rounding::kContract, is_lean);
      const GradientValues actual = run_backward(problem, dy, GetParam(), {.policy = policy});
      const auto expect_exact = [&](const char* name, const std::vector<float>& values,
                                    const std::vector<double>& rounded,
                                    const std::vector<double>& truth) {
        EXPECT_LE(relative_error(values, truth), 1.1 * relative_error(rounded, truth)) << name;
      };
      expect_exact("y", widened(run(problem, GetParam())), contract.y, exact.y);
      expect_exact("grad_x", actual.x, contract.x, exact.x);
      expect_exact("grad_scores", actual.scores, contract.scores, exact.scores);
      expect_exact("grad of gate", actual.gate, contract.gate, exact.gate);
      expect_exact("grad of up", actual.up, contract.up, exact.up);
      expect_exact("grad of w2", actual.down, contract.down, exact.down);
      if (problem.down_bias.empty()) continue;
      expect_exact("grad of the gate's bias", actual.gate_bias, contract.gate_bias,
                   exact.gate_bias);
      expect_exact("grad of the up's bias", actual.up_bias, contract.up_bias, exact.up_bias);
      expect_exact("grad of bias2", actual.down_bias, contract.down_bias, exact.down_bias);
    }
  }
}

/// A backward that another activation's or a swapped weight's gradients satisfied would be no test.
TEST(GradientOracles, TellOtherFormulasApart) {
  MoeProblem problem = make_problem(kShape, RoutePattern::kDistinct, 406);
  const std::vector<BF16> dy = make_dy(problem, 407);
  const GradientValues actual = run_backward(problem, dy, {});
  const GradientOracle right = gradient_oracle(problem, dy, Rounding::kContract);
  EXPECT_EQ(first_violation(problem, actual, right, kRounding), "");
  std::swap(problem.gate, problem.up);
  EXPECT_NE(first_violation(problem, actual, gradient_oracle(problem, dy, Rounding::kContract),
                            kRounding),
            "");
}

/// Finite differences of the FP64 forward prove the oracle, element by element.
TEST(GradientOracles, AreTheSlopesOfTheLoss) {
  for (const bool is_clamped : {false, true}) {
    MoeProblem problem = make_problem(
        {.num_tokens = 3, .hidden_dim = 3, .intermediate_dim = 2, .num_experts = 3, .top_k = 2},
        RoutePattern::kDistinct, 408);
    add_biases(problem, 409);
    if (is_clamped) problem = clamped(problem);
    const std::vector<BF16> dy = make_dy(problem, 410);
    const GradientOracle oracle = gradient_oracle(problem, dy, Rounding::kNone);
    // BF16 moves by steps of at least 2^-8 of its value: take one step to either side.
    const auto expect_slopes = [&](std::vector<BF16> MoeProblem::*member,
                                   const std::vector<double>& gradient, const char* name) {
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        MoeProblem above = problem;
        MoeProblem below = problem;
        BF16& a = (above.*member)[i];
        BF16& b = (below.*member)[i];
        const double value = to_float(a);
        a = to_bf16(value + std::abs(value) * 0x1p-7);
        b = to_bf16(value - std::abs(value) * 0x1p-7);
        const double step = to_float(a) - static_cast<double>(to_float(b));
        const double slope = (loss_of(above, dy) - loss_of(below, dy)) / step;
        EXPECT_NEAR(gradient[i], slope, 2e-3 * (1 + std::abs(slope))) << name << " " << i;
      }
    };
    expect_slopes(&MoeProblem::x, oracle.x, "x");
    expect_slopes(&MoeProblem::gate, oracle.gate, "gate");
    expect_slopes(&MoeProblem::up, oracle.up, "up");
    expect_slopes(&MoeProblem::down, oracle.down, "w2");
    const auto expect_float_slopes = [&](std::vector<float> MoeProblem::*member,
                                         const std::vector<double>& gradient, const char* name) {
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        MoeProblem above = problem;
        MoeProblem below = problem;
        (above.*member)[i] += 0x1p-10f;
        (below.*member)[i] -= 0x1p-10f;
        const double step = static_cast<double>((above.*member)[i]) - (below.*member)[i];
        const double slope = (loss_of(above, dy) - loss_of(below, dy)) / step;
        EXPECT_NEAR(gradient[i], slope, 1e-4 * (1 + std::abs(slope))) << name << " " << i;
      }
    };
    expect_float_slopes(&MoeProblem::scores, oracle.scores, "score");
    expect_float_slopes(&MoeProblem::gate_bias, oracle.gate_bias, "gate bias");
    expect_float_slopes(&MoeProblem::up_bias, oracle.up_bias, "up bias");
    expect_float_slopes(&MoeProblem::down_bias, oracle.down_bias, "bias2");
  }
}

// reports: A91: a 2 x 2 x 2 layer against the differences of its own loss.
TEST_P(Gradients, OfATinyLayerAreItsFiniteDifferences) {
  const MoeShape shape{
      .num_tokens = 2, .hidden_dim = 2, .intermediate_dim = 2, .num_experts = 2, .top_k = 2};
  const MoeProblem problem = make_problem(fit(shape, GetParam()), RoutePattern::kDistinct, 411);
  const std::vector<BF16> dy = make_dy(problem, 412);
  const GradientValues actual = run_backward(problem, dy, GetParam());
  for (std::size_t i = 0; i < problem.x.size(); ++i) {
    MoeProblem above = problem;
    MoeProblem below = problem;
    const double value = to_float(problem.x[i]);
    above.x[i] = to_bf16(value + 0x1p-5);
    below.x[i] = to_bf16(value - 0x1p-5);
    const double step = to_float(above.x[i]) - static_cast<double>(to_float(below.x[i]));
    const double slope = (loss_of(above, dy) - loss_of(below, dy)) / step;
    EXPECT_NEAR(actual.x[i], slope, 0.02 * (1 + std::abs(slope))) << i;
  }
}

// reports: A33, A34, A37, A117
TEST_P(Gradients, FormsOfTheSameValuesGiveTheSameBits) {
  MoeProblem problem = clamped(make_problem(kShape, RoutePattern::kMixed, 413));
  add_biases(problem, 414);
  problem.round_scores();
  problem.round_biases();
  const std::vector<BF16> dy = make_dy(problem, 415);
  const TokenCounts counts = ragged_split(kShape.num_tokens, GetParam().ranks, 9);
  const BackwardForm plain{.slot_factor = 1.0};
  // CUDA reads rows 16 bytes at a time.
  const std::int64_t row_step = GetParam().backend == BackendKind::kCpu ? 1 : 8;
  const GradientValues expected = run_backward(problem, dy, GetParam(), counts, plain);
  for (const W13Form w13 : {W13Form::kConcatenated, W13Form::kInterleaved, W13Form::kHalves}) {
    for (const bool is_strided : {false, true}) {
      const BackwardForm form{
          .call = {.id_dtype = is_strided ? DType::kI32 : DType::kI64,
                   .bias_dtype = is_strided ? DType::kBF16 : DType::kF32,
                   .w13 = w13,
                   .is_strided = is_strided,
                   .row_step = row_step},
          .slot_factor = is_strided ? std::optional<double>() : std::optional(1.0)};
      EXPECT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), counts, form)), "")
          << "w13 form " << static_cast<int>(w13) << (is_strided ? ", strided" : "");
    }
  }
}

/// At widths where the matrix library has a choice: for rows of weights with gaps it took another
/// product.
// reports: A117
TEST_P(Gradients, OfInterleavedWeightsOfModelWidthsHaveTheSameBits) {
  const MoeProblem problem = make_problem(
      {.num_tokens = 64, .hidden_dim = 512, .intermediate_dim = 256, .num_experts = 4, .top_k = 2},
      RoutePattern::kDistinct, 419);
  const std::vector<BF16> dy = make_dy(problem, 420);
  const GradientValues expected = run_backward(problem, dy, GetParam());
  const BackwardForm form{.call = {.w13 = W13Form::kInterleaved}};
  EXPECT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), form)), "");
}

/// Widths at which a slab of columns is a whole row, more than one, and a row with a rest.
TEST_P(Gradients, OfWeightsWithGapsBetweenRowsHaveTheSameBits) {
  for (const auto& [hidden_dim, intermediate_dim] :
       {std::pair(512, 256), std::pair(256, 512), std::pair(512, 512), std::pair(768, 1024),
        std::pair(512, 320), std::pair(96, 64)}) {
    const MoeProblem problem = make_problem({.num_tokens = 64,
                                             .hidden_dim = hidden_dim,
                                             .intermediate_dim = intermediate_dim,
                                             .num_experts = 4,
                                             .top_k = 2},
                                            RoutePattern::kDistinct, 421);
    const std::vector<BF16> dy = make_dy(problem, 422);
    for (const ActivationPolicy policy : {ActivationPolicy::kFull, ActivationPolicy::kLean}) {
      const GradientValues expected = run_backward(problem, dy, GetParam(), {.policy = policy});
      const std::int64_t row_step = GetParam().backend == BackendKind::kCpu ? 1 : 8;
      const BackwardForm form{.call = {.is_strided = true, .row_step = row_step}, .policy = policy};
      EXPECT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), form)), "")
          << "D = " << hidden_dim << ", F = " << intermediate_dim;
    }
  }
}

TEST_P(Gradients, OfBF16ScoresAndWeightsAreTheRoundedOnes) {
  MoeProblem problem = make_problem(kShape, RoutePattern::kMixed, 416);
  add_biases(problem, 417);
  problem.round_scores();
  const std::vector<BF16> dy = make_dy(problem, 418);
  GradientValues expected = run_backward(problem, dy, GetParam());
  for (auto* values : {&expected.scores, &expected.gate, &expected.up, &expected.down,
                       &expected.gate_bias, &expected.up_bias, &expected.down_bias}) {
    for (float& value : *values) value = to_float(to_bf16(value));
  }
  const BackwardForm form{.call = {.score_dtype = DType::kBF16}, .wgrad_dtype = DType::kBF16};
  EXPECT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), form)), "");
}

}  // namespace
}  // namespace distmoe::conformance
