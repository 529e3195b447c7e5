// SPDX-License-Identifier: Apache-2.0
//
// Invariant: `distmoe explain-kernels` prints the choice of kernels in words or as one JSON object
// on a machine without a GPU, and exits 2 or 3 with a reason for what cannot be.
#include <gtest/gtest.h>

#include <filesystem>

#include "command_testing.hpp"

namespace distmoe::tools {
namespace {

class ExplainKernelsCommand : public CommandTest {
 protected:
  CommandResult explain(const Words& more) {
    // No device is visible, whatever the machine has.
    Words words = {"env", "CUDA_VISIBLE_DEVICES=", command_path(), "explain-kernels"};
    words.insert(words.end(), more.begin(), more.end());
    return run_words(words);
  }
  void expect_refused(int exit_code, const Words& words, const std::string& reason) {
    const CommandResult result = explain(words);
    EXPECT_EQ(result.exit_code, exit_code) << reason;
    EXPECT_NE(result.error.find(reason), std::string::npos) << result.error;
    EXPECT_EQ(result.output, "");
  }
};

TEST_F(ExplainKernelsCommand, JsonHasWhatWasChosenAndWhy) {
  const CommandResult result =
      explain({"--model", "Qwen3-30B-A3B", "--tokens", "1", "8192", "--ranks", "2", "--json"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.error, "");
  const nlohmann::json json = result.json();
  EXPECT_EQ(json["model"], "Qwen3-30B-A3B");
  EXPECT_EQ(json["kernel_choice"], "tuned");
  EXPECT_EQ(json["local_experts"], 64);
  EXPECT_EQ(json["choice"]["kernel"], "sm90_bf16_grouped_gemm");
  EXPECT_EQ(json["choice"]["persistent_blocks"], 132);
  EXPECT_EQ(json["choice"]["clusters"], 66);
  EXPECT_EQ(json["choice"]["pulling_clusters"], 8);
  EXPECT_EQ(json["choice"]["arithmetic"]["splits_of_k"], 1);
  for (const char* key : {"precision", "hidden_dim", "intermediate_dim", "top_k", "num_experts",
                          "ranks", "ranks_per_device", "sms", "rank"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  EXPECT_EQ(json["tile_heights"][0]["dropped"], nullptr);
  EXPECT_EQ(json["tile_heights"].back()["dropped"], "shared_memory");
  ASSERT_EQ(json["calls"].size(), 2u);
  EXPECT_EQ(json["calls"][0]["tokens"], 1);
  const nlohmann::json& call = json["calls"][1];
  EXPECT_EQ(call["tokens"], 8192);
  EXPECT_EQ(call["rows"], 65536);
  EXPECT_EQ(call["pulled_rows"], 32768);
  EXPECT_EQ(call["rows_per_expert"], 1024.0);
  EXPECT_EQ(call["active_experts"], 64);
  ASSERT_EQ(call["products"].size(), 2u);
  for (const char* key : {"m", "k", "weight_tiles", "stages", "cluster_tiles", "waves", "fill",
                          "flops", "computed_flops", "weight_bytes", "weight_load_bytes", "pairs",
                          "computed_rows", "padding_rows"}) {
    EXPECT_TRUE(call["products"][0][key].is_number()) << key;
  }
  // W13 takes own rows before those that are pulled, W2 all rows of an expert together.
  const nlohmann::json& w13 = call["products"][0];
  const nlohmann::json& w2 = call["products"][1];
  EXPECT_EQ(w13["name"], "w13_swiglu");
  EXPECT_EQ(w13["padding_rows"], 0);
  EXPECT_EQ(w13["groups"][0]["rows"], 512);
  EXPECT_EQ(w13["groups"][0]["waits_for_pull"], false);
  EXPECT_EQ(w13["groups"][1]["waits_for_pull"], true);
  EXPECT_EQ(w13["groups"][0]["considered"][0]["pairs"], w13["groups"][0]["pairs"]);
  EXPECT_EQ(w2["name"], "w2_scatter");
  EXPECT_EQ(w2["groups"][0]["rows"], 1024);
  EXPECT_EQ(call["launches"].back()["kernel"], "combine");
}

TEST_F(ExplainKernelsCommand, FewRowsAreOneLaunchWithTheCheapestTiles) {
  const Words words = {"--model", "Qwen3-30B-A3B", "--tokens", "1", "129"};
  Words as_json = words;
  as_json.emplace_back("--json");
  const nlohmann::json calls = explain(as_json).json()["calls"];
  const nlohmann::json& few = calls[0]["few_rows"];
  EXPECT_EQ(calls[0]["not_few_rows"], nullptr);
  EXPECT_EQ(few["kernel"], "sm90_bf16_few_rows");
  EXPECT_EQ(few["w13_rows"], few["considered"][0]["w13_rows"]);
  EXPECT_EQ(few["w2_rows"], few["considered"][0]["w2_rows"]);
  EXPECT_LE(few["considered"][0]["cost"], few["considered"][1]["cost"]);
  EXPECT_TRUE(calls[0]["products"].empty());
  EXPECT_EQ(calls[0]["launches"].size(), 1u);
  EXPECT_EQ(few["one_token"], true);
  EXPECT_EQ(few["token_rows"], 8);
  EXPECT_EQ(calls[1]["few_rows"], nullptr);
  EXPECT_EQ(calls[1]["not_few_rows"], "routes");
  EXPECT_EQ(calls[1]["products"].size(), 2u);
  const std::string text = explain(words).output;
  for (const char* part :
       {"the whole call in one launch of sm90_bf16_few_rows: tiles of 96", "too many routes"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

TEST_F(ExplainKernelsCommand, TextNamesChoiceReasonsAndWaves) {
  const CommandResult result =
      explain({"--model", "Mixtral-8x7B", "--tokens", "8192", "--kernel-choice", "fixed"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  for (const char* part : {"Mixtral-8x7B", "kernel choice fixed", "132 persistent", "66 clusters",
                           "dropped: 160 token", "registers", "dropped: 168 to 256",
                           "shared_memory", "T=8192", "2048.0 an expert", "7 pair",
                           "w13_swiglu 28672 x 4096", "96 wave(s)", "w2_scatter", "GFLOP"}) {
    EXPECT_NE(result.output.find(part), std::string::npos) << part << "\n" << result.output;
  }
  EXPECT_EQ(result.error, "");
}

TEST_F(ExplainKernelsCommand, FixedAndTunedDifferInTheirNameAlone) {
  const Words words = {"--model", "OLMoE-1B-7B",        "--tokens", "7",     "--ranks",
                       "4",       "--ranks-per-device", "4",        "--json"};
  Words fixed = words;
  fixed.insert(fixed.end(), {"--kernel-choice", "fixed"});
  nlohmann::json tuned_json = explain(words).json();
  nlohmann::json fixed_json = explain(fixed).json();
  EXPECT_EQ(tuned_json["choice"]["persistent_blocks"], 32);
  EXPECT_EQ(fixed_json["kernel_choice"], "fixed");
  tuned_json.erase("kernel_choice");
  fixed_json.erase("kernel_choice");
  EXPECT_EQ(tuned_json, fixed_json);
}

TEST_F(ExplainKernelsCommand, ReadsTheShapeOfACheckpoint) {
  const auto folder = checkpoint_folder("gptoss");
  if (folder.empty()) GTEST_SKIP() << "checkpoint gptoss is not here";
  std::filesystem::copy_file(folder / "config.json", file("config.json"));
  const CommandResult result =
      explain({"--checkpoint", folder_.string(), "--tokens", "10", "--json"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.json()["hidden_dim"], 192);
  EXPECT_EQ(result.json()["calls"][0]["rows"], 40);
}

TEST_F(ExplainKernelsCommand, RefusesWrongArguments) {
  const Words shape = {"--hidden", "64", "--intermediate", "32", "--experts", "8"};
  const auto shape_and = [&](const Words& more) {
    Words words = shape;
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  expect_refused(2, {}, "--tokens");
  expect_refused(2, {"--tokens", "8"}, "--hidden");
  expect_refused(2, {"--model", "GPT-9", "--tokens", "8"}, "GPT-9");
  expect_refused(2, {"--checkpoint", file("none").string(), "--tokens", "8"}, "config.json");
  expect_refused(2, shape_and({"--tokens", "8"}), "--top-k");
  expect_refused(2, shape_and({"--top-k", "9", "--tokens", "8"}), "top_k is 9");
  expect_refused(2, shape_and({"--top-k", "2", "--tokens", "0"}), "--tokens");
  expect_refused(2, shape_and({"--top-k", "2", "--tokens", "8", "x"}), "'x'");
  expect_refused(2, shape_and({"--top-k", "2", "--tokens", "8", "--sms", "0"}), "--sms");
  expect_refused(2, shape_and({"--top-k", "2", "--tokens", "8", "--sms", "65537"}), "1..65536");
  expect_refused(2, shape_and({"--top-k", "2", "--tokens", "8", "--kernel-choice", "best"}),
                 "tuned or fixed");
  expect_refused(
      2, shape_and({"--top-k", "2", "--tokens", "8", "--ranks", "2", "--ranks-per-device", "3"}),
      "--ranks-per-device is 3");
  expect_refused(2, shape_and({"--top-k", "8", "--tokens", "2147483647"}), "2147483647");
}

TEST_F(ExplainKernelsCommand, SizesThatNoKernelTakesAreUnsupported) {
  expect_refused(
      3,
      {"--hidden", "60", "--intermediate", "32", "--top-k", "2", "--experts", "8", "--tokens", "8"},
      "hidden_dim (60)");
  expect_refused(
      3,
      {"--model", "Mixtral-8x7B", "--tokens", "8", "--ranks", "100", "--ranks-per-device", "100"},
      "100 ranks share");
}

}  // namespace
}  // namespace distmoe::tools
