// SPDX-License-Identifier: Apache-2.0
//
// Invariant: on real checkpoints every gradient that `distmoe run --train` writes is within 4.5e-3
// of the exact one and within 1e-3 of the numerics contract with FP64 sums, and has the same bytes
// for every number of ranks, engine, split, slot and schedule.
#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "command_testing.hpp"
#include "conformance/gradient_oracle.hpp"
#include "io/checkpoint.hpp"
#include "io/routed_input.hpp"
#include "io/safetensors.hpp"
#include "io/safetensors_writer.hpp"

namespace distmoe::tools {
namespace {

using conformance::GradientOracle;
using conformance::MoeProblem;
using conformance::Rounding;

constexpr double kExact = 4.5e-3;
constexpr double kContract = 1e-3;

/// All tensors of an output file by name, as FP32, and its bytes.
class GradientFile {
 public:
  explicit GradientFile(const std::filesystem::path& path) : file_(SafetensorsFile::open(path)) {}

  const StoredTensor& tensor(const std::string& name) const {
    const StoredTensor* found = file_.find(name);
    if (found == nullptr) throw std::runtime_error("no tensor " + name);
    return *found;
  }
  std::vector<float> values(const std::string& name) const {
    const StoredTensor& stored = tensor(name);
    std::vector<float> values;
    if (stored.dtype == DType::kF32) {
      values.resize(stored.data.size() / sizeof(float));
      std::memcpy(values.data(), stored.data.data(), stored.data.size());
      return values;
    }
    const std::vector<BF16> stored_rows = rows(name);
    values.reserve(stored_rows.size());
    for (const BF16 value : stored_rows) values.push_back(to_float(value));
    return values;
  }
  std::vector<BF16> rows(const std::string& name) const {
    const StoredTensor& stored = tensor(name);
    EXPECT_EQ(stored.dtype, DType::kBF16) << name;
    std::vector<BF16> values(stored.data.size() / sizeof(BF16));
    std::memcpy(values.data(), stored.data.data(), stored.data.size());
    return values;
  }
  /// The bytes of every tensor, by name.
  std::map<std::string, std::string> bytes() const {
    std::map<std::string, std::string> bytes;
    for (const StoredTensor& stored : file_.tensors()) {
      bytes[stored.name] = {reinterpret_cast<const char*>(stored.data.data()), stored.data.size()};
    }
    return bytes;
  }

 private:
  SafetensorsFile file_;
};

std::vector<float> floats_of(const TensorStorage& storage, DType dtype) {
  const std::size_t count = storage.num_bytes() / size_of(dtype);
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = dtype == DType::kF32 ? reinterpret_cast<const float*>(storage.data())[i]
                                     : to_float(reinterpret_cast<const BF16*>(storage.data())[i]);
  }
  return values;
}

/// Rows [0, half) of every expert's 2 * half rows to `first`, the others to `second`.
template <typename Value>
void split_halves(const Value* rows, std::int64_t experts, std::int64_t half_size,
                  std::vector<Value>& first, std::vector<Value>& second) {
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    const Value* begin = rows + 2 * expert * half_size;
    first.insert(first.end(), begin, begin + half_size);
    second.insert(second.end(), begin + half_size, begin + 2 * half_size);
  }
}

MoeProblem problem_of(const std::filesystem::path& folder, std::int64_t layer) {
  const Checkpoint checkpoint = Checkpoint::open(folder);
  const LayerShape& shape = checkpoint.shape();
  const LoadedExperts experts = checkpoint.load_experts(layer, 0, shape.num_experts);
  const RoutedInputFile input = RoutedInputFile::open(folder / "routed_experts.safetensors", layer);
  MoeProblem problem;
  problem.shape = {input.num_tokens(), shape.hidden_dim, shape.intermediate_dim, shape.num_experts,
                   input.top_k()};
  problem.activation = shape.activation;
  problem.alpha = shape.swiglu_alpha;
  problem.limit = shape.swiglu_limit;
  const auto* x = static_cast<const BF16*>(input.input().x_TD.data);
  problem.x.assign(x, x + input.input().x_TD.num_elements());
  const auto* ids = static_cast<const std::int32_t*>(input.input().topk_ids_TK.data);
  problem.ids.assign(ids, ids + problem.num_routes());
  const auto* scores = static_cast<const float*>(input.input().topk_scores_TK.data);
  problem.scores.assign(scores, scores + problem.num_routes());
  split_halves(reinterpret_cast<const BF16*>(experts.w13.data()), shape.num_experts,
               shape.intermediate_dim * shape.hidden_dim, problem.gate, problem.up);
  const auto* down = reinterpret_cast<const BF16*>(experts.w2.data());
  problem.down.assign(down, down + problem.gate.size());
  if (experts.has_bias) {
    const std::vector<float> bias13 = floats_of(experts.bias13, experts.bias13_dtype);
    split_halves(bias13.data(), shape.num_experts, shape.intermediate_dim, problem.gate_bias,
                 problem.up_bias);
    problem.down_bias = floats_of(experts.bias2, experts.bias2_dtype);
  }
  return problem;
}

void expect_near(const GradientFile& actual, const MoeProblem& problem,
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
  void SetUp() override { checkpoint_ = checkpoint_folder(GetParam()); }

  /// Runs layer `layer_` and gives what was written.
  GradientFile train(const Words& more, nlohmann::json* json = nullptr) {
    Words words{"--layer", std::to_string(layer_), "--train", "--json", "--output", file("out")};
    words.insert(words.end(), more.begin(), more.end());
    const CommandResult result = run(checkpoint_, words);
    EXPECT_EQ(result.exit_code, 0) << result.error;
    if (json != nullptr) *json = result.json();
    return GradientFile(file("out"));
  }

  std::filesystem::path checkpoint_;
  int layer_ = 0;
};

TEST_P(RunTrain, GradientsOfBothLayersKeepToTheContract) {
  for (layer_ = 0; layer_ < 2; ++layer_) {
    SCOPED_TRACE(layer_);
    const MoeProblem problem = problem_of(checkpoint_, layer_);
    const GradientFile file = train({"--wgrad-dtype", "fp32"});
    const std::vector<BF16> dy = file.rows("dy");
    expect_near(file, problem, gradient_oracle(problem, dy, Rounding::kNone), kExact);
    expect_near(file, problem, gradient_oracle(problem, dy, Rounding::kContract), kContract);
    const GradientFile lean = train({"--wgrad-dtype", "fp32", "--activation-policy", "lean"});
    expect_near(lean, problem, gradient_oracle(problem, dy, Rounding::kNone), kExact);
    expect_near(lean, problem, gradient_oracle(problem, dy, Rounding::kContract, true), kContract);
  }
}

// The tolerance of the contract with RMSNorm.
TEST_P(RunTrain, WithRmsnormKeepsToTheContract) {
  const MoeProblem problem = problem_of(checkpoint_, 0);
  nlohmann::json json;
  const GradientFile file =
      train({"--wgrad-dtype", "fp32", "--rmsnorm", "1e-5", "--clip-limit", "0.5"}, &json);
  const std::vector<BF16> dy = file.rows("dy");
  expect_near(file, problem,
              gradient_oracle(problem, dy, Rounding::kContract, false, {.eps = 1e-5}), 1.5e-3);
  EXPECT_TRUE(json["rel_l2"].is_null());
  const auto expected = file.bytes();
  nlohmann::json split_json;
  const GradientFile split = train({"--wgrad-dtype", "fp32", "--rmsnorm", "1e-5", "--clip-limit",
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
  const GradientFile per_route = train({"--activation-policy", "lean"});
  const GradientOracle oracle =
      gradient_oracle(problem, per_route.rows("dy"), Rounding::kContract, true);
  auto expected = per_route.bytes();
  expected.erase("y");
  for (const Words& more :
       {Words{}, Words{"--ranks", "3", "--slot-factor", "3"},
        Words{"--ranks", "4", "--microbatches", "2", "--layers-per-slot", "2"}}) {
    Words words{"--combine", "per_rank", "--activation-policy", "lean"};
    words.insert(words.end(), more.begin(), more.end());
    const GradientFile per_rank = train(words);
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
  EXPECT_TRUE(GradientFile(file("mpi")).bytes() == expected);
}

TEST_P(RunTrain, AccumulationAddsUpEveryBackward) {
  const std::vector<float> once = train({"--wgrad-dtype", "fp32"}).values("grad_w13");
  const std::vector<float> sum =
      train({"--wgrad-dtype", "fp32", "--accumulate", "--microbatches", "3"}).values("grad_w13");
  ASSERT_EQ(once.size(), sum.size());
  for (std::size_t i = 0; i < once.size(); ++i) {
    ASSERT_EQ(sum[i], once[i] + once[i] + once[i]) << i;
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

TEST_P(RunTrain, DyMayComeWithTheInput) {
  const GradientFile made = train({});
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

INSTANTIATE_TEST_SUITE_P(Checkpoints, RunTrain, testing::Values("qwen3moe", "gptoss"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace distmoe::tools
