// SPDX-License-Identifier: Apache-2.0
//
// Invariant: where an expert's few rows take other products than many, its gradients keep to the
// same contract, with bits that depend on its rows alone.
#include <gtest/gtest.h>

#include <cmath>

#include "conformance/moe_gradients.hpp"

namespace distmoe::conformance {
namespace {

class FewRowsGradients : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, FewRowsGradients, testing::ValuesIn(training_cases()), case_name);

/// On both sides of the cut, 24 rows on the CPU, and of the rows that are summed together, 8.
const std::vector<int> kCounts{1, 2, 7, 8, 9, 16, 17, 0, 23, 24, 25, 33};

/// Widths that no vector divides.
MoeProblem odd_problem(const MoeCase& moe_case, std::uint64_t seed) {
  const MoeShape widths =
      fit({.hidden_dim = 77, .intermediate_dim = 45, .num_experts = 1, .top_k = 1}, moe_case);
  MoeProblem problem = problem_of_counts(kCounts, widths, seed);
  add_biases(problem, seed + 1);
  return problem;
}

TEST_P(FewRowsGradients, KeepToTheContractOnBothSidesOfTheCut) {
  const MoeProblem problem = odd_problem(GetParam(), 640);
  const std::vector<BF16> dy = make_dy(problem, 642);
  EXPECT_EQ(first_violation(problem, run_backward(problem, dy, GetParam()),
                            gradient_oracle(problem, dy, Rounding::kContract), 1e-3),
            "");
}

TEST_P(FewRowsGradients, RanksAndSavingChangeNoBit) {
  const MoeProblem problem = odd_problem(GetParam(), 643);
  const std::vector<BF16> dy = make_dy(problem, 645);
  for (const ActivationPolicy policy : {ActivationPolicy::kFull, ActivationPolicy::kLean}) {
    const GradientValues expected =
        run_backward(problem, dy, single_rank_of(GetParam()), {.policy = policy});
    for (const std::optional<double> factor :
         {std::optional<double>(), std::optional(1.0 * GetParam().ranks)}) {
      const BackwardForm form{.policy = policy, .slot_factor = factor};
      EXPECT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), form)), "");
    }
  }
}

/// The other experts' gradients have the same bits, whatever an expert's rows hold.
TEST_P(FewRowsGradients, ANaNRowPoisonsItsOwnExpertAlone) {
  const MoeProblem problem = odd_problem(GetParam(), 646);
  const std::vector<BF16> dy = make_dy(problem, 648);
  const GradientValues clean = run_backward(problem, dy, GetParam());
  std::int64_t token = 0;
  for (std::size_t poisoned = 0; poisoned < kCounts.size(); ++poisoned) {
    if (kCounts[poisoned] == 0) continue;
    MoeProblem with_nan = problem;
    with_nan.x_row(token + kCounts[poisoned] - 1)[0] = to_bf16(NAN);
    token += kCounts[poisoned];
    const GradientValues actual = run_backward(with_nan, dy, GetParam());
    for (const auto values : {&GradientValues::gate, &GradientValues::up, &GradientValues::down,
                              &GradientValues::gate_bias, &GradientValues::up_bias}) {
      const std::vector<float>& before = clean.*values;
      const std::vector<float>& after = actual.*values;
      const std::size_t size = after.size() / kCounts.size();
      for (std::size_t i = 0; i < after.size(); ++i) {
        ASSERT_TRUE(i / size == poisoned ? std::isnan(after[i]) : after[i] == before[i]) << i;
      }
    }
    EXPECT_EQ(actual.down_bias, clean.down_bias);
  }
}

TEST_P(FewRowsGradients, DestinationsOfEveryKindGetTheSameSums) {
  const MoeProblem problem = odd_problem(GetParam(), 649);
  const std::vector<BF16> dy = make_dy(problem, 651);
  const GradientValues sums = run_backward(problem, dy, GetParam());
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool accumulates : {false, true}) {
      GradientValues expected = sums;
      for (auto* values : {&expected.gate, &expected.up, &expected.down, &expected.gate_bias,
                           &expected.up_bias, &expected.down_bias}) {
        for (float& value : *values) {
          if (accumulates) value += 0.75F;
          if (dtype == DType::kBF16) value = to_float(to_bf16(value));
        }
      }
      const BackwardForm form{
          .wgrad_dtype = dtype, .accumulates = accumulates, .initial = accumulates ? 0.75 : 0.0};
      EXPECT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), form)), "");
    }
  }
}

}  // namespace
}  // namespace distmoe::conformance
