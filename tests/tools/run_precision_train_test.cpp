// SPDX-License-Identifier: Apache-2.0
//
// Invariant: on real checkpoints every gradient of `distmoe run --train --precision mxfp8` is
// within the bounds of the format from the exact one, and has the same bytes for every number of
// ranks, slot and pipeline.
#include <gtest/gtest.h>

#include <cmath>

#include "checkpoint_problem.hpp"
#include "command_testing.hpp"
#include "conformance/gradient_oracle.hpp"

namespace distmoe::tools {
namespace {

using conformance::GradientOracle;
using conformance::MoeProblem;
using conformance::Rounding;

constexpr double kCosine = 0.9978;

class RunPrecisionTrain : public CommandTest, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    checkpoint_ = checkpoint_folder(GetParam());
    if (checkpoint_.empty()) GTEST_SKIP() << "no checkpoint " << GetParam();
  }
  TensorFile train(int layer, const Words& more) {
    Words words{
        "--layer",  std::to_string(layer), "--train", "--precision", "mxfp8", "--json", "--output",
        file("out")};
    words.insert(words.end(), more.begin(), more.end());
    const CommandResult result = run(checkpoint_, words);
    EXPECT_EQ(result.exit_code, 0) << result.error;
    return TensorFile(file("out"));
  }

  std::filesystem::path checkpoint_;
};

void expect_within(const char* name, const std::vector<float>& actual,
                   const std::vector<double>& exact, double least, double most) {
  const double error = conformance::relative_error(actual, exact);
  EXPECT_LE(error, most) << name;
  EXPECT_GE(error, least) << name;
  double dot = 0;
  double squares = 0;
  double exact_squares = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    dot += actual[i] * exact[i];
    squares += std::pow(static_cast<double>(actual[i]), 2);
    exact_squares += exact[i] * exact[i];
  }
  EXPECT_GT(dot / std::sqrt(squares * exact_squares), kCosine) << name;
}

/// Gate and up of every expert, one behind the other, as W13 has them.
std::vector<double> joined(const std::vector<double>& gate, const std::vector<double>& up,
                           std::int64_t experts) {
  std::vector<double> both;
  const auto half = static_cast<std::ptrdiff_t>(gate.size()) / experts;
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    for (const std::vector<double>* part : {&gate, &up}) {
      both.insert(both.end(), part->begin() + expert * half, part->begin() + (expert + 1) * half);
    }
  }
  return both;
}

TEST_P(RunPrecisionTrain, GradientsAreWithinTheBoundsOfTheFormat) {
  for (const int layer : {0, 1}) {
    SCOPED_TRACE(layer);
    const MoeProblem problem = problem_of(checkpoint_, layer);
    const std::int64_t experts = problem.shape.num_experts;
    const TensorFile file = train(layer, {"--wgrad-dtype", "fp32"});
    const GradientOracle exact = gradient_oracle(problem, file.rows("dy"), Rounding::kNone);
    expect_within("x", file.values("grad_x"), exact.x, 0.01, 0.060);
    expect_within("scores", file.values("grad_scores"), exact.scores, 0.01, 0.043);
    expect_within("w13", file.values("grad_w13"), joined(exact.gate, exact.up, experts), 0.01,
                  0.068);
    expect_within("w2", file.values("grad_w2"), exact.down, 0.01, 0.052);
    if (problem.gate_bias.empty()) continue;
    expect_within("bias13", file.values("grad_bias13"),
                  joined(exact.gate_bias, exact.up_bias, experts), 0.01, 0.054);
    expect_within("bias2", file.values("grad_bias2"), exact.down_bias, 0.0, 0.003);
  }
}

TEST_P(RunPrecisionTrain, NoByteDependsOnRanksSlotsOrPipelines) {
  const auto expected = train(0, {}).bytes();
  for (const Words& words : {Words{"--pipeline", "mega", "--slot-factor", "1"},
                             Words{"--ranks", "3", "--slot-factor", "3"},
                             Words{"--ranks", "2", "--pipeline", "mega", "--microbatches", "3",
                                   "--layers-per-slot", "2", "--slot-factor", "1"}}) {
    EXPECT_TRUE(train(0, words).bytes() == expected) << testing::PrintToString(words);
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, RunPrecisionTrain,
                         testing::Values("qwen3moe", "mixtral", "gptoss", "deepseekv3"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace distmoe::tools
