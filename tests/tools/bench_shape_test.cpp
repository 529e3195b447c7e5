// SPDX-License-Identifier: Apache-2.0
// Invariant: a shape is a model of the table or four numbers, with the experts of the group or of
// one rank, and anything else is refused with what is legal.
#include "bench/bench_shape.hpp"

#include <gtest/gtest.h>

#include "distmoe/error.hpp"

namespace distmoe::tools {
namespace {

std::string refusal_of(const char* text) {
  try {
    parse_bench_shapes(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << text << " was accepted";
  return {};
}

TEST(BenchShape, NumbersAreDFEK) {
  const BenchShape expected{"64,32,8,2", 64, 32, 2, 8, false};
  EXPECT_EQ(parse_bench_shapes("64,32,8,2"), std::vector<BenchShape>{expected});
  EXPECT_EQ(expected.experts_of(4), 8);
}

TEST(BenchShape, ANameIsLookedUpInTheModelTable) {
  const BenchShape expected{"Qwen3-30B-A3B", 2048, 768, 8, 128, false};
  EXPECT_EQ(parse_bench_shapes("qwen3-30b-a3b"), std::vector<BenchShape>{expected});
}

TEST(BenchShape, ExpertsPerRankGrowWithTheGroup) {
  const BenchShape model = parse_bench_shapes("DeepSeek-V3@32")[0];
  EXPECT_EQ(model.name, "DeepSeek-V3@32");
  EXPECT_EQ(model.hidden_dim, 7168);
  EXPECT_EQ(model.experts_of(1), 32);
  EXPECT_EQ(model.experts_of(8), 256);
  const BenchShape numbers = parse_bench_shapes("64,32,8,2@3")[0];
  EXPECT_EQ(numbers.name, "64,32,8,2@3");
  EXPECT_EQ(numbers.experts_of(2), 6);
}

TEST(BenchShape, EachIsTheSixPublishedLayers) {
  std::vector<std::string> names;
  for (const BenchShape& shape : parse_bench_shapes("each")) names.push_back(shape.name);
  const std::vector<std::string> expected = {"Mixtral-8x7B", "DeepSeek-V3@32", "Qwen3-235B-A22B",
                                             "gpt-oss-120b", "Qwen3-30B-A3B",  "OLMoE-1B-7B"};
  EXPECT_EQ(names, expected);
}

TEST(BenchShape, OtherTextsAreRefusedWithTheirValue) {
  EXPECT_NE(refusal_of("64,32,8").find("D,F,E,K"), std::string::npos);
  EXPECT_NE(refusal_of("64,32,8,2,1").find("D,F,E,K"), std::string::npos);
  EXPECT_NE(refusal_of("64,32,0,2").find("'0'"), std::string::npos);
  EXPECT_NE(refusal_of("64,32,,2").find("''"), std::string::npos);
  EXPECT_NE(refusal_of("64,32,8,2x").find("'2x'"), std::string::npos);
  EXPECT_NE(refusal_of("64,32,8,2@").find("experts per rank"), std::string::npos);
  EXPECT_NE(refusal_of("OLMoE-1B-7B@-1").find("'-1'"), std::string::npos);
  EXPECT_NE(refusal_of("GPT-9").find("GPT-9"), std::string::npos);
  EXPECT_NE(refusal_of("").find("known"), std::string::npos);
}

}  // namespace
}  // namespace distmoe::tools
