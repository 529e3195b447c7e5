// SPDX-License-Identifier: Apache-2.0
//
// Invariant: on real checkpoints a low precision is as far from the reference as its format makes
// it, no further and no nearer; y has the same bits for every number of ranks and both pipelines.
#include <gtest/gtest.h>

#include "command_testing.hpp"

namespace distmoe::tools {
namespace {

struct Range {
  const char* precision;
  double least, most, cosine;
};
constexpr Range kMxfp8{"mxfp8", 0.015, 0.033, 0.9995};
constexpr Range kNvfp4{"nvfp4", 0.06, 0.115, 0.9935};
constexpr Range kMxfp4{"mxfp4", 0.055, 0.10, 0.9945};

class RunPrecision : public CheckpointLayerTest {
 protected:
  nlohmann::json run_with(const Words& more, int exit_code = 0) {
    Words words{"--layer", std::to_string(layer()), "--json"};
    words.insert(words.end(), more.begin(), more.end());
    const CommandResult result = run(checkpoint_, words);
    EXPECT_EQ(result.exit_code, exit_code) << result.error;
    return result.exit_code <= 1 ? result.json() : nlohmann::json();
  }
  std::string y_of(const char* precision, const Words& more) {
    Words words{"--precision", precision, "--output", file("y")};
    words.insert(words.end(), more.begin(), more.end());
    run_with(words);
    return read_file(file("y"));
  }
};

TEST_P(RunPrecision, IsAsFarFromTheReferenceAsItsFormatMakesIt) {
  for (const Range& range : {kMxfp8, kNvfp4, kMxfp4}) {
    const nlohmann::json json = run_with({"--precision", range.precision});
    ASSERT_FALSE(json.is_null());
    EXPECT_EQ(json["precision"], range.precision);
    EXPECT_GE(json["rel_l2"].get<double>(), range.least) << range.precision;
    EXPECT_LE(json["rel_l2"].get<double>(), range.most) << range.precision;
    EXPECT_GT(json["cosine"].get<double>(), range.cosine) << range.precision;
  }
}

TEST_P(RunPrecision, RanksAndPipelinesChangeNoBit) {
  for (const Range& range : {kMxfp8, kNvfp4, kMxfp4}) {
    const std::string y = y_of(range.precision, {});
    EXPECT_TRUE(y == y_of(range.precision, {"--pipeline", "mega", "--ranks", "3"}));
    EXPECT_TRUE(y == y_of(range.precision, {"--tokens-per-rank", "500,0,12"}));
  }
}

/// The codes that `distmoe quantize` writes are those that the source is computed with.
TEST_P(RunPrecision, OfAQuantisedCheckpointIsThatOfItsSource) {
  const std::filesystem::path source = checkpoint_;
  const Words input{"--input", (source / "routed_experts.safetensors").string()};
  for (const Range& range : {kMxfp8, kNvfp4, kMxfp4}) {
    // The names of fused experts are those of mxfp4 alone.
    if (std::string(std::get<0>(GetParam())) == "gptoss" && range.precision != kMxfp4.precision) {
      continue;
    }
    checkpoint_ = source;
    const std::string y = y_of(range.precision, input);
    checkpoint_ = file(range.precision);
    const CommandResult result =
        run_words({command_path(), "quantize", "--checkpoint", source.string(), "--format",
                   range.precision, "--output", checkpoint_.string()});
    ASSERT_EQ(result.exit_code, 0) << result.error;
    EXPECT_TRUE(y == y_of(range.precision, input)) << range.precision;
    Words words = input;
    words.insert(words.end(), {"--precision", range.precision, "--ranks", "3"});
    EXPECT_EQ(run_with(words)["stored_codes"], true);
  }
}

TEST_P(RunPrecision, WhatCannotRunSaysWhy) {
  const auto refused = [&](const Words& more, const std::string& word) {
    Words words{"--layer", "0"};
    words.insert(words.end(), more.begin(), more.end());
    const CommandResult result = run(checkpoint_, words);
    EXPECT_EQ(result.exit_code, 2) << testing::PrintToString(more);
    EXPECT_NE(result.error.find(word), std::string::npos) << result.error;
  };
  refused({"--precision", "fp8"}, "--precision is 'fp8'");
  refused({"--pipeline", "fast"}, "--pipeline is 'fast'");
  refused({"--precision", "nvfp4", "--train"}, "inference");
  refused({"--dump-codes", file("codes")}, "--precision mxfp8, nvfp4 or mxfp4");
  refused({"--precision", "mxfp8", "--dump-codes", file("codes"), "--ranks", "2"}, "one rank");
  EXPECT_FALSE(std::filesystem::exists(file("codes")));
  const CommandResult outside =
      run(checkpoint_, {"--layer", "0", "--precision", "mxfp8", "--tolerance", "0.008"});
  EXPECT_EQ(outside.exit_code, 1);
}

INSTANTIATE_TEST_SUITE_P(Models, RunPrecision, checkpoint_layers(), checkpoint_layer_name);

}  // namespace
}  // namespace distmoe::tools
