// SPDX-License-Identifier: Apache-2.0
//
// Invariant: on real checkpoints every gradient that `distmoe run --train` writes is within 4.5e-3
// of the exact one and within 1e-3 of the numerics contract with FP64 sums, and has the same bytes
// for every number of ranks, engine, split, slot and schedule.
#include <gtest/gtest.h>

#include <map>

#include "checkpoint_problem.hpp"
#include "command_testing.hpp"
#include "conformance/gradient_oracle.hpp"
#include "io/safetensors.hpp"
#include "io/safetensors_writer.hpp"

namespace distmoe::tools {
namespace {

using conformance::GradientOracle;
using conformance::MoeProblem;
using conformance::Rounding;

constexpr double kExact = 4.5e-3;
constexpr double kContract = 1e-3;

void expect_near(const TensorFile& actual, const MoeProblem& problem,
                 const GradientOracle& expected, double tolerance) {
  const auto expect = [&](const char* what, const std::vector<float>& values,
                          const std::vector<double>& oracle) {
    EXPECT_LE(conformance::relative_error(values, oracle), tolerance) << what;
  };
  const auto expect_halves = [&](const char* name, std::int64_t half_size,
                                 const std::vector<double>& gate, const std::vector<double>& up) {
    const std::vector<float> values = actual.values(name);
    std::vector<float> first;
    std::vector<float> second;
    split_halves(values.data(), problem.shape.num_experts, half_size, first, second);
    expect(name, first, gate);
    expect(name, second, up);
  };
  expect("y", actual.values("y"), expected.y);
  expect("grad_x", actual.values("grad_x"), expected.x);
  expect("grad_scores", actual.values("grad_scores"), expected.scores);
  expect("grad_w2", actual.values("grad_w2"), expected.down);
  expect_halves("grad_w13", problem.shape.intermediate_dim * problem.shape.hidden_dim,
                expected.gate, expected.up);
  if (problem.gate_bias.empty()) return;
  expect("grad_bias2", actual.values("grad_bias2"), expected.down_bias);
  expect_halves("grad_bias13", problem.shape.intermediate_dim, expected.gate_bias,
                expected.up_bias);
}

class RunTrain : public CommandTest, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    checkpoint_ = checkpoint_folder(GetParam());
    if (checkpoint_.empty()) GTEST_SKIP() << "no checkpoint " << GetParam();
  }

  /// Runs layer `layer_` and gives what was written.
  TensorFile train(const Words& more, nlohmann::json* json = nullptr) {
    Words words{"--layer", std::to_string(layer_), "--train", "--json", "--output", file("out")};
    words.insert(words.end(), more.begin(), more.end());
    const CommandResult result = run(checkpoint_, words);
    EXPECT_EQ(result.exit_code, 0) << result.error;
    if (json != nullptr) *json = result.json();
    return TensorFile(file("out"));
  }

  std::filesystem::path checkpoint_;
  int layer_ = 0;
};

class RunTrainGradients : public RunTrain {};

TEST_P(RunTrainGradients, OfBothLayersKeepToTheContract) {
  for (layer_ = 0; layer_ < 2; ++layer_) {
    SCOPED_TRACE(layer_);
    const MoeProblem problem = problem_of(checkpoint_, layer_);
    const TensorFile file = train({"--wgrad-dtype", "fp32"});
    const std::vector<BF16> dy = file.rows("dy");
    const GradientOracle exact = gradient_oracle(problem, dy, Rounding::kNone);
    expect_near(file, problem, exact, kExact);
    expect_near(file, problem, gradient_oracle(problem, dy, Rounding::kContract), kContract);
    const TensorFile lean = train({"--wgrad-dtype", "fp32", "--activation-policy", "lean"});
    expect_near(lean, problem, exact, kExact);
    expect_near(lean, problem, gradient_oracle(problem, dy, Rounding::kContract, true), kContract);
  }
}

// The tolerance of the contract with RMSNorm.
TEST_P(RunTrain, WithRmsnormKeepsToTheContract) {
  const MoeProblem problem = problem_of(checkpoint_, 0);
  nlohmann::json json;
  const TensorFile file =
      train({"--wgrad-dtype", "fp32", "--rmsnorm", "1e-5", "--clip-limit", "0.5"}, &json);
  const std::vector<BF16> dy = file.rows("dy");
  expect_near(file, problem,
              gradient_oracle(problem, dy, Rounding::kContract, false, {.eps = 1e-5}), 1.5e-3);
  EXPECT_TRUE(json["rel_l2"].is_null());
  const auto expected = file.bytes();
  nlohmann::json split_json;
  const TensorFile split = train({"--wgrad-dtype", "fp32", "--rmsnorm", "1e-5", "--clip-limit",
                                  "0.5", "--ranks", "3", "--slot-factor", "3"},
                                 &split_json);
  EXPECT_TRUE(split.bytes() == expected);
  EXPECT_EQ(json["clip_counts"]["elements"],
            512 * problem.shape.top_k * problem.shape.intermediate_dim);
  EXPECT_GT(json["clip_counts"]["gate"].get<std::int64_t>(), 0);
  EXPECT_GT(json["clip_counts"]["up"].get<std::int64_t>(), 0);
  EXPECT_EQ(json["clip_counts"], split_json["clip_counts"]);
  // No absolute value is below a negative limit.
  train({"--clip-limit", "-0.5"}, &json);
  EXPECT_EQ(json["clip_counts"]["up"], json["clip_counts"]["elements"]);
  EXPECT_LT(json["clip_counts"]["gate"], json["clip_counts"]["elements"]);
}

TEST_P(RunTrain, NoByteDependsOnRanksSlotsOrSchedules) {
  const auto expected = train({}).bytes();
  EXPECT_GE(expected.size(), 6U);
  for (const Words& words :
       {Words{"--ranks", "2"}, Words{"--ranks", "3", "--slot-factor", "3"},
        Words{"--ranks", "4", "--repeat", "2"}, Words{"--tokens-per-rank", "0,500,12"},
        Words{"--slots", "2", "--layers-per-slot", "2", "--microbatches", "3", "--slot-factor",
              "0.6"},
        Words{"--ranks", "2", "--slots", "3", "--microbatches", "5", "--slot-factor", "1.2"}}) {
    nlohmann::json json;
    EXPECT_TRUE(train(words, &json).bytes() == expected) << testing::PrintToString(words);
    EXPECT_TRUE(json["repeat_bitwise_equal"].get<bool>());
  }
}

// What travels back in a forward is no part of its backward.
TEST_P(RunTrain, LeanGradientsDoNotDependOnTheCombine) {
  const MoeProblem problem = problem_of(checkpoint_, 0);
  const TensorFile per_route = train({"--activation-policy", "lean"});
  const GradientOracle oracle =
      gradient_oracle(problem, per_route.rows("dy"), Rounding::kContract, true);
  auto expected = per_route.bytes();
  expected.erase("y");
  for (const Words& more :
       {Words{}, Words{"--ranks", "3", "--slot-factor", "3"},
        Words{"--ranks", "4", "--microbatches", "2", "--layers-per-slot", "2"}}) {
    Words words{"--combine", "per_rank", "--activation-policy", "lean"};
    words.insert(words.end(), more.begin(), more.end());
    const TensorFile per_rank = train(words);
    EXPECT_LE(conformance::relative_error(per_rank.values("y"), oracle.y), kContract);
    auto actual = per_rank.bytes();
    actual.erase("y");
    EXPECT_TRUE(actual == expected) << testing::PrintToString(words);
  }
  const CommandResult full = run(checkpoint_, {"--layer", "0", "--train", "--combine", "per_rank"});
  EXPECT_EQ(full.exit_code, 3);
  EXPECT_NE(full.error.find("unsupported"), std::string::npos) << full.error;
}

TEST_P(RunTrain, UnderMpiToo) {
  if (!mpi_problem().empty()) GTEST_SKIP() << mpi_problem();
  const auto expected = train({}).bytes();
  const CommandResult result =
      run_mpi(3, checkpoint_, {"--layer", "0", "--train", "--output", file("mpi")});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_TRUE(TensorFile(file("mpi")).bytes() == expected);
}

TEST_P(RunTrain, AccumulationAddsUpEveryBackward) {
  const TensorFile one = train({"--wgrad-dtype", "fp32"});
  std::map<std::string, std::vector<float>> singles;
  for (const auto& [name, unused] : one.bytes()) singles[name] = one.values(name);
  const TensorFile three = train({"--wgrad-dtype", "fp32", "--accumulate", "--microbatches", "3"});
  for (const auto& [name, once] : singles) {
    const std::vector<float> sum = three.values(name);
    const bool is_added = name.starts_with("grad_w") || name.starts_with("grad_bias");
    ASSERT_EQ(once.size(), sum.size()) << name;
    for (std::size_t i = 0; i < once.size(); ++i) {
      ASSERT_EQ(sum[i], is_added ? once[i] + once[i] + once[i] : once[i]) << name << " " << i;
    }
  }
}

TEST_P(RunTrain, TheReportCountsWhatIsComputedAgain) {
  nlohmann::json json;
  train({"--microbatches", "3", "--layers-per-slot", "2"}, &json);
  EXPECT_EQ(json["forwards"], 6);
  EXPECT_EQ(json["recomputed_layers"], 6);
  // Two layers' x of 512 tokens.
  EXPECT_EQ(json["slot_peak_bytes"],
            nlohmann::json::array({2 * 512 * problem_of(checkpoint_, 0).shape.hidden_dim * 2}));
  EXPECT_GT(json["device_scratch_peak_bytes"].get<std::int64_t>(), 0);
  EXPECT_EQ(json["host_scratch_peak_bytes"], 0);
  train({"--slot-factor", "1", "--slots", "2", "--microbatches", "2"}, &json);
  EXPECT_EQ(json["recomputed_layers"], 0);
  EXPECT_EQ(json["slot_peak_bytes"].size(), 2U);
}

TEST_P(RunTrain, TheTextSaysWhatWasComparedAndRepeated) {
  const auto text = [&](const Words& more) {
    Words words{"--layer", "0", "--train"};
    words.insert(words.end(), more.begin(), more.end());
    const CommandResult result = run(checkpoint_, words);
    EXPECT_EQ(result.exit_code, 0) << result.error;
    return result.output;
  };
  const std::string norm = text({"--rmsnorm", "1e-5"});
  EXPECT_NE(norm.find("y_ref is of the layer without --rmsnorm"), std::string::npos) << norm;
  EXPECT_EQ(norm.find("repeats"), std::string::npos) << norm;
  const std::string several = text({"--microbatches", "3"});
  EXPECT_NE(several.find("bitwise equal"), std::string::npos) << several;
}

/// Values computed elsewhere, from what docs/command-line.md says; the first two outputs of
/// SplitMix64 are the published 0xE220A8397B1DCDAF and 0x910A2DEC89025CC1.
TEST_P(RunTrain, DyIsTheDocumentedHashOfItsIndex) {
  const std::vector<BF16> dy = train({"--ranks", "2"}).rows("dy");
  for (const auto& [index, bits] :
       {std::pair(0U, 0xBE6FU), std::pair(1U, 0xBF5EU), std::pair(2U, 0xBF51U),
        std::pair(3U, 0x3E68U), std::pair(255U, 0x3ECEU), std::pair(256U, 0x3F4CU),
        std::pair(1000U, 0x3EF0U), std::pair(512U * 192U - 1, 0xBF6FU)}) {
    EXPECT_EQ(dy[index].bits, bits) << index;
  }
}

TEST_P(RunTrain, StatsHaveALineForEveryLayer) {
  const CommandResult result =
      run(checkpoint_, {"--layer", "0", "--train", "--layers-per-slot", "2", "--slots", "2",
                        "--microbatches", "2", "--ranks", "3", "--stats"});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  for (const char* part :
       {"layer 0 of slot 0, to compute again: busiest rank ", "layer 1 of slot 0",
        "layer 0 of slot 1", "layer 1 of slot 1", "0 dropped; scratch "}) {
    EXPECT_NE(result.output.find(part), std::string::npos) << part << '\n' << result.output;
  }
}

TEST_P(RunTrain, DyMayComeWithTheInput) {
  const TensorFile made = train({});
  const auto expected = made.bytes();
  const SafetensorsFile captured =
      SafetensorsFile::open(checkpoint_ / "routed_experts.safetensors");
  std::vector<TensorEntry> entries;
  std::vector<std::span<const std::byte>> data;
  for (const char* name : {"x", "topk_ids", "topk_scores"}) {
    const StoredTensor* tensor = captured.find(std::string("layer0.") + name);
    entries.push_back({std::string("layer0.") + name, tensor->known_dtype(), tensor->shape});
    data.push_back(tensor->data);
  }
  const StoredTensor& dy = made.tensor("dy");
  entries.push_back({"layer0.dy", DType::kBF16, dy.shape});
  data.push_back(dy.data);
  SafetensorsWriter writer(file("with_dy"), entries);
  for (const auto& bytes : data) writer.append(bytes);
  writer.commit();
  EXPECT_TRUE(train({"--input", file("with_dy"), "--ranks", "2"}).bytes() == expected);
}

TEST_P(RunTrain, WrongOptionsAreNamed) {
  const auto expect_refused = [&](const Words& more, const std::string& word) {
    Words words{"--layer", "0"};
    words.insert(words.end(), more.begin(), more.end());
    const CommandResult result = run(checkpoint_, words);
    EXPECT_EQ(result.exit_code, 2) << testing::PrintToString(more);
    EXPECT_NE(result.error.find(word), std::string::npos) << result.error;
  };
  expect_refused({"--wgrad-dtype", "fp32"}, "--wgrad-dtype is an option of training");
  expect_refused({"--accumulate"}, "--accumulate is an option of training");
  expect_refused({"--slots", "2"}, "--slots is an option of training");
  expect_refused({"--train", "--wgrad-dtype", "fp16"}, "--wgrad-dtype");
  expect_refused({"--train", "--slots", "0"}, "--slots");
  expect_refused({"--train", "--microbatches", "x"}, "--microbatches");
  expect_refused({"--train", "--slot-factor", "-1"}, "--slot-factor");
  expect_refused({"--train", "--activation-policy", "none"}, "--activation-policy");
  expect_refused({"--train", "--rmsnorm", "0"}, "--rmsnorm");
  expect_refused({"--train", "--clip-limit", "nan"}, "--clip-limit");
  expect_refused({"--rmsnorm", "1e-5"}, "--rmsnorm is an option of training");
  expect_refused({"--train", "--graph"}, "--graph");
  expect_refused(
      {"--train", "--repeat", "2", "--input2", checkpoint_ / "routed_experts.safetensors"},
      "--input2");
}

std::string checkpoint_name(const testing::TestParamInfo<const char*>& test) { return test.param; }

INSTANTIATE_TEST_SUITE_P(Checkpoints, RunTrain, testing::Values("qwen3moe", "gptoss"),
                         checkpoint_name);
INSTANTIATE_TEST_SUITE_P(Checkpoints, RunTrainGradients,
                         testing::Values("qwen3moe", "mixtral", "gptoss", "deepseekv3"),
                         checkpoint_name);

}  // namespace
}  // namespace distmoe::tools
