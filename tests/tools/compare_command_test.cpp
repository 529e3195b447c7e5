// SPDX-License-Identifier: Apache-2.0
//
// Invariant: `distmoe compare` says of every precision and layer what `distmoe run` says of them,
// and which token is worst; what a precision cannot hold is a line, not an end.
#include <gtest/gtest.h>

#include <algorithm>

#include "command_testing.hpp"

namespace distmoe::tools {
namespace {

class CompareCommand : public CommandTest {
 protected:
  CommandResult compare(const Words& more) {
    Words words{command_path(), "compare"};
    words.insert(words.end(), more.begin(), more.end());
    return run_words(words);
  }
};

TEST_F(CompareCommand, SaysWhatRunsSay) {
  const std::filesystem::path folder = checkpoint_folder("gptoss");
  const CommandResult result = compare({"--checkpoint", folder, "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  const nlohmann::json json = result.json();
  EXPECT_EQ(json["reference"], "y_ref");
  ASSERT_EQ(json["rows"].size(), 8U);
  std::int64_t bf16_bytes = 0;
  for (const nlohmann::json& row : json["rows"]) {
    const std::string precision = row["precision"];
    const nlohmann::json alone = run(folder, {"--layer", std::to_string(row["layer"].get<int>()),
                                              "--precision", precision, "--json"})
                                     .json();
    EXPECT_EQ(row["rel_l2"], alone["rel_l2"]) << precision;
    EXPECT_EQ(row["cosine"], alone["cosine"]) << precision;
    EXPECT_GE(row["worst_rel_l2"].get<double>(), row["rel_l2"].get<double>());
    EXPECT_GE(row["worst_token"].get<int>(), 0);
    EXPECT_LT(row["worst_token"].get<int>(), 512);
    const auto bytes = row["weight_bytes"].get<std::int64_t>();
    if (precision == "bf16") bf16_bytes = bytes;
    EXPECT_LE(bytes, bf16_bytes);
    if (precision == "nvfp4" || precision == "mxfp4") {
      EXPECT_LT(bytes, bf16_bytes / 3);
    }
  }
}

TEST_F(CompareCommand, PrintsALineForEveryPrecisionOfALayer) {
  const CommandResult result =
      compare({"--checkpoint", checkpoint_folder("qwen3moe"), "--layer", "1"});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  for (const char* word : {"relative L2", "worst row", "bf16", "mxfp8", "nvfp4", "mxfp4"}) {
    EXPECT_NE(result.output.find(word), std::string::npos) << word;
  }
  EXPECT_EQ(std::count(result.output.begin(), result.output.end(), '\n'), 8);
}

/// bf16 is the reference of an input without a y_ref: the same NaN is no agreement.
TEST_F(CompareCommand, WhatIsNoNumberIsCountedAndNoResult) {
  const Words words{"--checkpoint", checkpoint_folder("qwen3moe"), "--layer", "0", "--input",
                    file("input")};
  SampleInput input(3, 2, 256, {0, 1, 2, 3, 4, 5});
  std::fill_n(input.x.begin(), 256, std::uint16_t{0x7FC0});
  input.write(file("input"));
  Words json_words = words;
  json_words.push_back("--json");
  const CommandResult some = compare(json_words);
  EXPECT_EQ(some.exit_code, 0) << some.error;
  const nlohmann::json rows = some.json()["rows"];
  EXPECT_FALSE(rows.empty());
  for (const nlohmann::json& row : rows) {
    EXPECT_EQ(row["left_out"], 256) << row;
    EXPECT_EQ(row["one_sided"], 0) << row;
    EXPECT_LT(row["rel_l2"].get<double>(), 1) << row;
    EXPECT_NE(row["worst_token"], 0) << row;
  }
  std::fill(input.x.begin(), input.x.end(), std::uint16_t{0x7FC0});
  input.write(file("input"));
  const CommandResult all = compare(words);
  EXPECT_EQ(all.exit_code, 1);
  EXPECT_NE(all.error.find("768 of both, left out"), std::string::npos) << all.error;
  EXPECT_NE(all.output.find("infinite"), std::string::npos) << all.output;
}

TEST_F(CompareCommand, WrongArgumentsAreNamed) {
  EXPECT_EQ(compare({}).exit_code, 2);
  const std::string folder = checkpoint_folder("gptoss");
  const CommandResult layer = compare({"--checkpoint", folder, "--layer", "99"});
  EXPECT_EQ(layer.exit_code, 2);
  EXPECT_NE(layer.error.find("99"), std::string::npos) << layer.error;
  SampleInput(4, 4, 192, std::vector<std::int64_t>(16, 0)).write(file("input"));
  const CommandResult input = compare({"--checkpoint", folder, "--input", file("input")});
  EXPECT_EQ(input.exit_code, 2);
  EXPECT_NE(input.error.find("--layer"), std::string::npos) << input.error;
}

}  // namespace
}  // namespace distmoe::tools
