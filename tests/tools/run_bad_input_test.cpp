// SPDX-License-Identifier: Apache-2.0
// Invariant: what breaks the contract ends with its exit code and one paragraph on stderr that has
// the values; stdout stays empty and no output file is left behind.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "command_testing.hpp"
#include "io/tiny_model.hpp"

namespace distmoe::tools {
namespace {

constexpr std::int64_t kHidden = 256;  // of qwen3moe, which has 16 experts

class RunBadInput : public CommandTest {
 protected:
  void SetUp() override {
    checkpoint_ = checkpoint_folder("qwen3moe");
    if (checkpoint_.empty()) GTEST_SKIP() << "no checkpoint qwen3moe";
  }

  void expect_failure(int exit_code, const Words& more, const Words& reasons) {
    Words words{"--layer", "0", "--output", file("y")};
    words.insert(words.end(), more.begin(), more.end());
    const CommandResult result = run(checkpoint_, words);
    EXPECT_EQ(result.exit_code, exit_code) << result.error;
    EXPECT_EQ(result.output, "");
    EXPECT_EQ(result.error.rfind("distmoe: ", 0), 0u) << result.error;
    EXPECT_EQ(result.error.find('\n'), result.error.size() - 1) << result.error;
    for (const std::string& reason : reasons) {
      EXPECT_NE(result.error.find(reason), std::string::npos)
          << "no '" << reason << "' in: " << result.error;
    }
    expect_no_output("y");
  }

  std::filesystem::path write(const SampleInput& input, DType ids_dtype = DType::kI32) const {
    input.write(file("input"), ids_dtype);
    return file("input");
  }

  /// y of a run that must succeed.
  std::string y_of(const SampleInput& input, const Words& more = {},
                   DType ids_dtype = DType::kI32) {
    Words words{"--layer", "0", "--output", file("y"), "--input", write(input, ids_dtype)};
    words.insert(words.end(), more.begin(), more.end());
    const CommandResult result = run(checkpoint_, words);
    EXPECT_EQ(result.exit_code, 0) << result.error;
    return result.exit_code == 0 ? read_y(file("y"), input.num_tokens, kHidden) : "failed";
  }

  std::filesystem::path checkpoint_;
};

/// Before a weight is read: its expert's name stands in no message.
TEST_F(RunBadInput, WidthsThatAPrecisionCannotHoldAreRefusedWithTheValues) {
  using distmoe::testing::TinyModel;
  checkpoint_ = file("checkpoint");
  std::filesystem::create_directories(checkpoint_);
  const TinyModel model{.num_experts = 4, .d = 80, .f = 40};
  std::ofstream(checkpoint_ / "config.json") << model.config("Qwen3MoeForCausalLM", 1);
  distmoe::testing::write_tensors(checkpoint_ / "model.safetensors",
                                  model.per_expert(0, TinyModel::projection_name));
  SampleInput(4, 2, 80, {0, 1, 2, 3, 0, 1, 2, 3}).write(file("input"));
  const auto expect_refusal = [&](const Words& more, const Words& reasons) {
    Words words{"--input", file("input")};
    words.insert(words.end(), more.begin(), more.end());
    expect_failure(2, words, reasons);
  };
  for (const Words& training : {Words{}, Words{"--train"}}) {
    Words words{"--precision", "mxfp8"};
    words.insert(words.end(), training.begin(), training.end());
    expect_refusal(words, {"hidden_dim is 80", "mxfp8", "multiple of 32"});
  }
  expect_refusal({"--precision", "nvfp4"}, {"intermediate_dim is 40", "nvfp4", "multiple of 16"});
  expect_refusal({"--precision", "mxfp4", "--ranks", "2"}, {"hidden_dim is 80", "multiple of 32"});
}

// reports: A26
TEST_F(RunBadInput, RefusesIdsOutsideTheExpertsWithTokenSlotIdAndLimit) {
  for (const std::int64_t id :
       {std::int64_t{1000000}, std::int64_t{16}, std::int64_t{2147483647}, std::int64_t{-2}}) {
    const SampleInput input(3, 2, kHidden, {3, 4, 5, id, 6, 7});
    const std::string value = " is " + std::to_string(id) + ";";
    expect_failure(2, {"--input", write(input)},
                   {"invalid_argument", "topk_ids[1, 1]" + value, "0 to 15"});
    // The token is the first one of rank 1.
    expect_failure(2, {"--input", write(input), "--ranks", "3"},
                   {"invalid_argument", "rank 1", "topk_ids[0, 1]" + value, "0 to 15"});
  }
}

// reports: A31
TEST_F(RunBadInput, RefusesIdsBeyond32BitsInsteadOfTruncatingThem) {
  const SampleInput input(1, 2, kHidden, {3, (std::int64_t{1} << 32) + 5});
  expect_failure(2, {"--input", write(input, DType::kI64)}, {"4294967301"});
}

// reports: A30, A31
TEST_F(RunBadInput, TakesInt32AndInt64IdsAlikeAndNamesEveryOtherType) {
  std::vector<std::int64_t> ids(40 * 6);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i * 5 % 16);
  const SampleInput input(40, 6, kHidden, ids);
  EXPECT_TRUE(y_of(input, {}, DType::kI32) == y_of(input, {}, DType::kI64));
  std::filesystem::remove(file("y"));
  expect_failure(2, {"--input", write(input, DType::kI16)}, {"I16"});
  expect_failure(2, {"--input", write(input, DType::kU32)}, {"U32"});
  expect_failure(2, {"--input", write(input, DType::kF32)}, {"F32"});
}

// reports: A24
TEST_F(RunBadInput, TreatsIdMinusOneAsNoRouteWhateverItsScore) {
  SampleInput with_hole(2, 2, kHidden, {2, -1, -1, 9});
  with_hole.scores = {0.5f, 0.5f, std::numeric_limits<float>::quiet_NaN(), 0.25f};
  SampleInput without(2, 1, kHidden, {2, 9});
  without.scores = {0.5f, 0.25f};
  const std::string y = y_of(without);
  EXPECT_NE(y, std::string(y.size(), '\0'));
  EXPECT_TRUE(y_of(with_hole) == y);
  EXPECT_TRUE(y_of(with_hole, {"--ranks", "3"}) == y);
}

// reports: A27
TEST_F(RunBadInput, GivesExactZerosWhereNoRouteIsLeft) {
  const SampleInput input(1, 4, kHidden, {-1, -1, -1, -1});
  EXPECT_EQ(y_of(input, {"--repeat", "1000", "--ranks", "2"}), std::string(kHidden * 2, '\0'));
}

TEST_F(RunBadInput, RunsWithoutAnyToken) {
  EXPECT_EQ(y_of(SampleInput(0, 3, kHidden, {}), {"--ranks", "2"}), "");
}

TEST_F(RunBadInput, RefusesAnInputOfAnotherHiddenSizeOrWithMoreRoutesThanExperts) {
  expect_failure(2, {"--input", write(SampleInput(2, 1, 192, {0, 1}))}, {"192", "256"});
  std::vector<std::int64_t> ids(17, 1);
  expect_failure(2, {"--input", write(SampleInput(1, 17, kHidden, ids))}, {"17", "16"});
}

TEST_F(RunBadInput, RefusesFilesThatAreMissingOrDamaged) {
  expect_failure(2, {"--input", file("missing")}, {"missing"});
  std::ofstream(file("input")) << "not a safetensors file at all";
  expect_failure(2, {"--input", file("input")}, {"input"});
  expect_failure(2, {"--layer", "77"}, {"--layer"});
  const CommandResult layer = run(checkpoint_, {"--layer", "77"});
  EXPECT_EQ(layer.exit_code, 2);
  EXPECT_NE(layer.error.find("77"), std::string::npos) << layer.error;
  const CommandResult result = run(file("nowhere"), {"--layer", "0"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.error.find("nowhere"), std::string::npos) << result.error;
}

TEST_F(RunBadInput, RefusesSplitsThatDoNotAddUp) {
  expect_failure(2, {"--tokens-per-rank", "500,13"}, {"513", "512"});
  expect_failure(2, {"--ranks", "3", "--tokens-per-rank", "500,12"}, {"2 entries", "3 ranks"});
}

TEST_F(RunBadInput, RefusesOutputsThatCannotBeWritten) {
  const CommandResult result =
      run(checkpoint_, {"--layer", "0", "--output", file("no") / "folder"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.error.find("no folder"), std::string::npos) << result.error;
}

TEST_F(RunBadInput, RefusesOutputsThatWouldReplaceTheCheckpointOrTheInput) {
  std::filesystem::copy(checkpoint_, file("copy"));
  std::filesystem::create_symlink("copy", file("link"));
  const SampleInput input(3, 2, kHidden, {3, 4, 5, 6, 7, 8});
  write(input);
  for (const std::string folder : {"copy", "link"}) {
    for (const std::string name : {"config.json", "model.safetensors",
                                   "model.safetensors.index.json", "routed_experts.safetensors"}) {
      const std::filesystem::path path = file(folder) / name;
      const std::string before = read_file(path);
      const CommandResult result = run(file("copy"), {"--layer", "0", "--output", path});
      EXPECT_EQ(result.exit_code, 2);
      EXPECT_NE(result.error.find(path), std::string::npos) << result.error;
      EXPECT_TRUE(read_file(path) == before) << path << " was replaced";
    }
  }
  const CommandResult result =
      run(file("copy"), {"--layer", "0", "--input", file("input"), "--output", file("input")});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.error.find(file("input")), std::string::npos) << result.error;
  // Other names of the folder are the user's to give.
  EXPECT_EQ(run(file("copy"), {"--layer", "0", "--output", file("copy") / "y"}).exit_code, 0);
}

TEST_F(RunBadInput, SaysThatThisBuildHasNoCuda) {
  expect_failure(3, {"--backend", "cuda"}, {"unsupported", "CUDA"});
}

TEST_F(RunBadInput, SaysHowManyRowsAreMissingWhereAllTokensGoToOneRank) {
  // 64 tokens of 4 ranks, one route each, all to expert 5 (rank 1): 256 rows; planned 1.5 * 64.
  const SampleInput input(256, 1, kHidden, std::vector<std::int64_t>(256, 5));
  expect_failure(3, {"--input", write(input), "--ranks", "4", "--device-factor", "1.5"},
                 {"capacity_exceeded", "256", "96", "rank 1"});
  EXPECT_EQ(y_of(input, {"--ranks", "4"}).size(), 256u * kHidden * 2);
}

TEST_F(RunBadInput, RefusesFactorsThatContradictEachOther) {
  expect_failure(2, {"--ranks", "4", "--device-factor", "3", "--total-factor", "2"}, {"3", "2"});
}

TEST_F(RunBadInput, EndsWithOneOutsideTheToleranceAndStillWritesTheOutput) {
  const CommandResult result =
      run(checkpoint_, {"--layer", "0", "--tolerance", "1e-9", "--json", "--output", file("y")});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_GT(result.json()["rel_l2"].get<double>(), 1e-9);
  EXPECT_NE(result.error.find("outside the tolerance"), std::string::npos) << result.error;
  EXPECT_TRUE(std::filesystem::exists(file("y")));
}

}  // namespace
}  // namespace distmoe::tools
