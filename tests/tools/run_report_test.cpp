// SPDX-License-Identifier: Apache-2.0
// Invariant: the report of a run is complete and pure, its numbers keep their promises, and a wrong
// output never passes for a right one.
#include <gtest/gtest.h>

#include <numeric>

#include "command_testing.hpp"
#include "io/safetensors.hpp"
#include "io/write_safetensors.hpp"

namespace distmoe::tools {
namespace {

constexpr std::int64_t kHidden = 256;

class RunReportTest : public CommandTest {
 protected:
  void SetUp() override {
    checkpoint_ = checkpoint_folder("qwen3moe");
    if (checkpoint_.empty()) GTEST_SKIP() << "no checkpoint qwen3moe";
  }

  std::filesystem::path checkpoint_;
};

std::int64_t sum_of(const nlohmann::json& list) {
  const auto values = list.get<std::vector<std::int64_t>>();
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

TEST_F(RunReportTest, JsonIsOneObjectWithTheDocumentedKeysAndNothingElse) {
  for (const Words& more : {Words{}, {"--stats"}, {"--repeat", "3"}}) {
    Words words{"--layer", "1", "--ranks", "3", "--json"};
    words.insert(words.end(), more.begin(), more.end());
    const CommandResult result = run(checkpoint_, words);
    ASSERT_EQ(result.exit_code, 0) << result.error;
    const nlohmann::json json = result.json();
    std::vector<std::string> keys;
    for (const auto& [key, value] : json.items()) keys.push_back(key);
    EXPECT_EQ(keys, (std::vector<std::string>{
                        "architecture", "backend", "checkpoint", "combine", "cosine", "engine",
                        "experts_per_rank", "imbalance", "layer", "max_abs", "peak_bytes",
                        "planned_bytes", "precision", "ranks", "rel_l2", "repeat_bitwise_equal",
                        "rows_per_rank", "seconds", "tokens"}));
    EXPECT_EQ(result.error.empty(), more != Words{"--stats"}) << result.error;
  }
}

TEST_F(RunReportTest, JsonHasTheFactsOfTheRun) {
  const nlohmann::json json =
      run(checkpoint_, {"--layer", "1", "--ranks", "3", "--json", "--repeat", "4"}).json();
  EXPECT_EQ(json["checkpoint"], checkpoint_.string());
  EXPECT_EQ(json["architecture"], "Qwen3MoeForCausalLM");
  EXPECT_EQ(json["layer"], 1);
  EXPECT_EQ(json["ranks"], 3);
  EXPECT_EQ(json["engine"], "threads");
  EXPECT_EQ(json["backend"], "cpu");
  EXPECT_EQ(json["combine"], "per_route");
  EXPECT_EQ(json["precision"], "bf16");
  EXPECT_EQ(json["tokens"], 512);
  EXPECT_EQ(sum_of(json["rows_per_rank"]), 512 * 4);
  EXPECT_EQ(json["experts_per_rank"], (nlohmann::json{6, 5, 5}));
  EXPECT_GT(json["imbalance"].get<double>(), 1.0);
  EXPECT_LE(json["imbalance"].get<double>(), 16.0);
  EXPECT_GT(json["cosine"].get<double>(), 0.9999);
  EXPECT_GT(json["max_abs"].get<double>(), 0.0);
  EXPECT_GT(json["seconds"].get<double>(), 0.0);
  EXPECT_EQ(json["repeat_bitwise_equal"], true);
}

TEST_F(RunReportTest, PeakMemoryStaysWithinPlanWeightsAndSlack) {
  constexpr std::int64_t kSlack = std::int64_t{32} << 20;
  for (const int ranks : {1, 2, 5}) {
    const nlohmann::json json =
        run(checkpoint_, {"--layer", "0", "--json", "--ranks", std::to_string(ranks)}).json();
    const std::int64_t most_experts = json["experts_per_rank"][0].get<std::int64_t>();
    const std::int64_t weight_bytes = most_experts * 3 * kHidden * 256 * 2;
    EXPECT_LE(json["peak_bytes"].get<std::int64_t>(),
              json["planned_bytes"].get<std::int64_t>() + weight_bytes + kSlack);
    EXPECT_GT(json["peak_bytes"].get<std::int64_t>(), weight_bytes / 2);
  }
}

TEST_F(RunReportTest, DistanceIsNullWithoutAReference) {
  SampleInput(5, 2, kHidden, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}).write(file("input"));
  const CommandResult result =
      run(checkpoint_, {"--layer", "0", "--json", "--input", file("input")});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  const nlohmann::json json = result.json();
  for (const char* key : {"rel_l2", "cosine", "max_abs"}) EXPECT_TRUE(json[key].is_null()) << key;
}

TEST_F(RunReportTest, NanWhereTheReferenceIsFiniteIsOutsideEveryTolerance) {
  SampleInput input(4, 2, kHidden, {1, 2, 3, 4, 5, 6, 7, 8});
  input.x[2 * kHidden + 17] = 0x7fc0;
  const std::vector<float> y_ref(4 * kHidden, 0.5f);
  distmoe::testing::write_safetensors(
      file("input"), {{"layer0.x", TensorView(input.x.data(), DType::kBF16, {4, kHidden})},
                      {"layer0.topk_ids", TensorView(input.ids.data(), DType::kI64, {4, 2})},
                      {"layer0.topk_scores", TensorView(input.scores.data(), DType::kF32, {4, 2})},
                      {"layer0.y_ref", TensorView(y_ref.data(), DType::kF32, {4, kHidden})}});
  const CommandResult result = run(checkpoint_, {"--layer", "0", "--json", "--ranks", "2",
                                                 "--tolerance", "1e300", "--input", file("input")});
  EXPECT_EQ(result.exit_code, 1) << result.error;
  EXPECT_GT(result.json()["rel_l2"].get<double>(), 1e300);
}

std::vector<std::byte> tensor_bytes(const std::filesystem::path& path, const std::string& name) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  const StoredTensor* tensor = file.find(name);
  EXPECT_NE(tensor, nullptr) << name;
  if (tensor == nullptr) return {};
  return {tensor->data.begin(), tensor->data.end()};
}

TEST_F(RunReportTest, TwoInputsAlternateAndBothOutputsAreThoseOfTheirOwnRuns) {
  SampleInput(5, 2, kHidden, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}).write(file("a"));
  SampleInput(5, 2, kHidden, {10, 9, 0, 0, 15, 14, 3, 1, 2, 11}).write(file("b"));
  for (const char* name : {"a", "b"}) {
    const CommandResult alone = run(checkpoint_, {"--layer", "0", "--input", file(name), "--output",
                                                  file(std::string("y_") + name)});
    ASSERT_EQ(alone.exit_code, 0) << alone.error;
  }
  for (const Words& more : {Words{}, {"--repeat", "5"}}) {
    Words words{"--layer",  "0",       "--ranks",  "3",       "--input", file("a"),
                "--input2", file("b"), "--output", file("y"), "--json"};
    words.insert(words.end(), more.begin(), more.end());
    const CommandResult result = run(checkpoint_, words);
    ASSERT_EQ(result.exit_code, 0) << result.error;
    EXPECT_EQ(result.json()["repeat_bitwise_equal"], true);
    EXPECT_TRUE(result.json()["rel_l2_input2"].is_null());
    EXPECT_EQ(tensor_bytes(file("y"), "y"), tensor_bytes(file("y_a"), "y"));
    EXPECT_EQ(tensor_bytes(file("y"), "y2"), tensor_bytes(file("y_b"), "y"));
    EXPECT_NE(tensor_bytes(file("y"), "y"), tensor_bytes(file("y"), "y2"));
  }
}

TEST_F(RunReportTest, ASecondInputOfAnotherShapeIsRefused) {
  SampleInput(5, 2, kHidden, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}).write(file("a"));
  SampleInput(4, 2, kHidden, {1, 2, 3, 4, 5, 6, 7, 8}).write(file("b"));
  const CommandResult shape =
      run(checkpoint_, {"--layer", "0", "--input", file("a"), "--input2", file("b")});
  EXPECT_EQ(shape.exit_code, 2);
  EXPECT_NE(shape.error.find("--input2 needs the shapes"), std::string::npos) << shape.error;
  const CommandResult once = run(
      checkpoint_, {"--layer", "0", "--input", file("a"), "--input2", file("a"), "--repeat", "1"});
  EXPECT_EQ(once.exit_code, 2);
  EXPECT_NE(once.error.find("--repeat 2 or more"), std::string::npos) << once.error;
}

TEST_F(RunReportTest, AGraphNeedsCuda) {
  const CommandResult result = run(checkpoint_, {"--layer", "0", "--graph"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.error.find("--backend cuda"), std::string::npos) << result.error;
}

TEST_F(RunReportTest, TextIsForPeopleAndStatsSayMore) {
  const CommandResult brief = run(checkpoint_, {"--layer", "0", "--ranks", "2"});
  EXPECT_EQ(brief.exit_code, 0) << brief.error;
  EXPECT_EQ(brief.error, "");
  for (const char* word : {"Qwen3MoeForCausalLM", "relative L2", "within", "MiB"}) {
    EXPECT_NE(brief.output.find(word), std::string::npos) << word << " in " << brief.output;
  }
  EXPECT_EQ(brief.output.find("rows per expert"), std::string::npos);
  const CommandResult stats = run(checkpoint_, {"--layer", "0", "--ranks", "2", "--stats"});
  for (const char* word : {"rows per expert", "call seconds", "communication", "allocated",
                           "forward: busiest rank 1.", " x the mean; 0 dropped; scratch "}) {
    EXPECT_NE(stats.output.find(word), std::string::npos) << word << " in " << stats.output;
  }
}

TEST_F(RunReportTest, FailsWhereStdoutCannotBeWritten) {
  const CommandResult result =
      run_words({"sh", "-c",
                 "'" + command_path() + "' run --checkpoint '" + checkpoint_.string() +
                     "' --layer 0 --output '" + file("y").string() + "' > /dev/full"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.error.find("stdout"), std::string::npos) << result.error;
  expect_no_output("y");
}

// Every subcommand: exit 3, and one paragraph that says so.
TEST_F(RunReportTest, EverySubcommandSaysThatStdoutCannotBeWritten) {
  for (const std::string words : {"plan --model DeepSeek-V3 --tokens 4096 --json", "info --json",
                                  "info", "--help", "run --help", "--version"}) {
    SCOPED_TRACE(words);
    const CommandResult result =
        run_words({"sh", "-c", "'" + command_path() + "' " + words + " > /dev/full"});
    EXPECT_EQ(result.exit_code, 3);
    EXPECT_NE(result.error.find("io: cannot write to stdout"), std::string::npos) << result.error;
  }
}

TEST_F(RunReportTest, FailsWhereTheOutputDoesNotFitAndLeavesNothing) {
  // 512 * 256 BF16 are 256 KiB; the limit is 64 KiB of 1024 bytes. The signal of the limit would
  // end the command before it can say why and remove what it wrote.
  const CommandResult result = run_words(
      {"bash", "-c",
       "ulimit -f 64; '" + command_path() + "' run --checkpoint '" + checkpoint_.string() +
           "' --layer 0 --ranks 3 --output '" + file("y").string() + "'"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.error.find("cannot write"), std::string::npos) << result.error;
  EXPECT_NE(result.error.find("File too large"), std::string::npos) << result.error;
  EXPECT_EQ(result.output, "");
  expect_no_output("y");
}

class InfoTest : public CommandTest {};

TEST_F(InfoTest, ListsWhatWasCompiledWhatRunsHereAndWhatCanBeSet) {
  const CommandResult result =
      run_words({"env", "DISTMOE_NUM_THREADS=3", command_path(), "info", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.error, "");
  const nlohmann::json json = result.json();
  EXPECT_FALSE(json["version"].get<std::string>().empty());
  EXPECT_EQ(json["backends"][0]["name"], "cpu");
  EXPECT_EQ(json["backends"][0]["runs"], true);
  EXPECT_EQ(json["backends"][1]["name"], "cuda");
  EXPECT_EQ(json["engines"][0]["name"], "threads");
  EXPECT_EQ(json["engines"][1]["name"], "mpi");
  EXPECT_FALSE(json["engines"][1]["detail"].get<std::string>().empty());
  EXPECT_EQ(json["engines"][2]["name"], "tcp");
  EXPECT_EQ(json["engines"][2]["runs"], true);
  EXPECT_EQ(json["engines"][3]["name"], "nccl");
  EXPECT_FALSE(json["engines"][3]["detail"].get<std::string>().empty());
  EXPECT_GE(json["machine"]["usable_cores"].get<int>(), 1);
  bool is_listed = false;
  for (const auto& variable : json["environment"]) {
    if (variable["name"] != "DISTMOE_NUM_THREADS") continue;
    is_listed = true;
    EXPECT_EQ(variable["value"], "3");
  }
  EXPECT_TRUE(is_listed);
}

TEST_F(InfoTest, SaysTheSameToPeople) {
  const CommandResult result = run_words({command_path(), "info"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  for (const char* word : {"backends", "engines", "machine", "DISTMOE_LOG_LEVEL (not set)"}) {
    EXPECT_NE(result.output.find(word), std::string::npos) << word << " in " << result.output;
  }
}

}  // namespace
}  // namespace distmoe::tools
