// SPDX-License-Identifier: Apache-2.0
//
// Invariant: every public model of the table is found by its name in any case and by a part that is
// its own, and its shape is a legal configuration.
#include "plan/model_table.hpp"

#include <gtest/gtest.h>

#include <string>

#include "plan/plan_testing.hpp"

namespace distmoe {
namespace {

TEST(ModelTable, HasThePublicModels) {
  for (const char* name : {"Mixtral-8x7B", "Mixtral-8x22B", "Qwen3-30B-A3B", "Qwen3-235B-A22B",
                           "DeepSeek-V3", "Kimi-K2", "GLM-4.5", "OLMoE", "gpt-oss-20b",
                           "gpt-oss-120b", "Llama-4-Scout", "Phi-3.5-MoE", "DBRX", "Granite"}) {
    EXPECT_NO_THROW(find_model(name)) << name;
  }
  const ModelShape& deepseek = find_model("deepseek-v3");
  EXPECT_EQ(deepseek.hidden_dim, 7168);
  EXPECT_EQ(deepseek.intermediate_dim, 2048);
  EXPECT_EQ(deepseek.top_k, 8);
  EXPECT_EQ(deepseek.num_experts, 256);
  EXPECT_EQ(deepseek.num_moe_layers, 58);
}

TEST(ModelTable, FindsAPartThatOneNameHas) {
  EXPECT_EQ(find_model("8x22b").name, "Mixtral-8x22B");
  expect_error(
      ErrorCode::kInvalidArgument, [] { find_model("mixtral"); }, "model 'mixtral' fits several",
      "Mixtral-8x7B, Mixtral-8x22B");
}

TEST(ModelTable, NamesWhatItKnowsWhereAskedForMore) {
  expect_error(
      ErrorCode::kInvalidArgument, [] { find_model("GPT-2"); }, "model 'GPT-2' is not known",
      "Mixtral-8x7B", "gpt-oss-120b");
  expect_error(
      ErrorCode::kInvalidArgument, [] { find_model(""); }, "is not known");
}

TEST(ModelTable, EveryShapeIsLegalInItsPrecisions) {
  for (const ModelShape& model : model_table()) {
    Config config;
    config.max_tokens = 4096;
    config.hidden_dim = model.hidden_dim;
    config.intermediate_dim = model.intermediate_dim;
    config.top_k = model.top_k;
    config.num_experts = model.num_experts;
    config.max_moe_layers_per_activation_slot = model.num_moe_layers;
    EXPECT_NO_THROW(validate(config)) << model.name;
    config.precision = Precision::kMXFP8;
    EXPECT_NO_THROW(validate(config)) << model.name;
  }
}

}  // namespace
}  // namespace distmoe
