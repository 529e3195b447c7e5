// SPDX-License-Identifier: Apache-2.0
//
// Invariant: sizes, activation and the list of MoE layers come from config.json as the architecture
// defines them; what cannot be right or is not known is refused with the key and its value.
#include "io/model_config.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "io/expect_error.hpp"
#include "io/temporary_directory.hpp"

namespace distmoe {
namespace {

using testing::expect_error;

ModelConfig read(const std::string& text) {
  const testing::TemporaryDirectory directory;
  testing::write_file(directory / "config.json", text);
  return read_model_config(directory / "config.json");
}

/// A configuration with `entries` in place of, or beside, the required ones.
std::string config(const std::string& architecture, const std::string& entries) {
  std::string text = R"({"architectures":[")" + architecture + "\"]";
  for (const char* entry :
       {R"("hidden_size":64)", R"("num_local_experts":8)", R"("num_experts_per_tok":2)",
        R"("num_hidden_layers":6)", R"("intermediate_size":96)", R"("moe_intermediate_size":48)"}) {
    const std::string key(entry, std::string(entry).find(':') + 1);
    if (entries.find(key) == std::string::npos) text += "," + std::string(entry);
  }
  return text + (entries.empty() ? "" : ",") + entries + "}";
}

TEST(ModelConfig, ReadsTheExpertWidthThatTheArchitectureMeans) {
  EXPECT_EQ(read(config("MixtralForCausalLM", "")).shape.intermediate_dim, 96);
  EXPECT_EQ(read(config("OlmoeForCausalLM", "")).shape.intermediate_dim, 96);
  EXPECT_EQ(read(config("GptOssForCausalLM", "")).shape.intermediate_dim, 96);
  EXPECT_EQ(read(config("Qwen3MoeForCausalLM", "")).shape.intermediate_dim, 48);
  EXPECT_EQ(read(config("DeepseekV3ForCausalLM", "")).shape.intermediate_dim, 48);
}

TEST(ModelConfig, ListsTheLayersWithExperts) {
  using Layers = std::vector<std::int64_t>;
  EXPECT_EQ(read(config("MixtralForCausalLM", R"("first_k_dense_replace":3)")).moe_layers,
            (Layers{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(read(config("DeepseekV3ForCausalLM", R"("first_k_dense_replace":3)")).moe_layers,
            (Layers{3, 4, 5}));
  EXPECT_EQ(read(config("DeepseekV3ForCausalLM", R"("first_k_dense_replace":1,"moe_layer_freq":2)"))
                .moe_layers,
            (Layers{2, 4}));
  EXPECT_EQ(read(config("Qwen3MoeForCausalLM", R"("decoder_sparse_step":2)")).moe_layers,
            (Layers{1, 3, 5}));
  EXPECT_EQ(read(config("Qwen3MoeForCausalLM", R"("mlp_only_layers":[0,4])")).moe_layers,
            (Layers{1, 2, 3, 5}));
}

TEST(ModelConfig, TakesPredictionLayersOfDeepSeekAsOptional) {
  const ModelConfig model =
      read(config("DeepseekV3ForCausalLM", R"("num_nextn_predict_layers":2)"));
  EXPECT_EQ(model.optional_moe_layers, (std::vector<std::int64_t>{6, 7}));
  EXPECT_EQ(model.moe_layers.size(), 6u);
}

TEST(ModelConfig, ReadsTheClampedActivationOfGptOss) {
  const LayerShape plain = read(config("GptOssForCausalLM", "")).shape;
  EXPECT_EQ(plain.activation, Activation::kSwiGLUClamped);
  EXPECT_EQ(plain.swiglu_alpha, 1.702);
  EXPECT_EQ(plain.swiglu_limit, 7.0);
  EXPECT_TRUE(plain.has_bias);
  EXPECT_EQ(read(config("GptOssForCausalLM", R"("swiglu_limit":6)")).shape.swiglu_limit, 6.0);
  for (const char* bad : {"0", "-1", "\"7\"", "1e999", "[]"}) {
    const std::string entry = std::string(R"("swiglu_limit":)") + bad;
    expect_error(ErrorCode::kIo, {}, [&] { read(config("GptOssForCausalLM", entry)); });
  }
}

TEST(ModelConfig, AcceptsSynonymsThatAgree) {
  const std::string agreeing = R"("num_experts":8,"n_routed_experts":8)";
  EXPECT_EQ(read(config("Qwen3MoeForCausalLM", agreeing)).shape.num_experts, 8);
  expect_error(ErrorCode::kIo, {"num_local_experts = 8", "but 9"},
               [&] { read(config("Qwen3MoeForCausalLM", R"("num_experts":9)")); });
}

TEST(ModelConfig, NamesTheKeyAndTheLegalRangeOfABadValue) {
  for (const char* key : {"hidden_size", "num_local_experts", "num_experts_per_tok",
                          "num_hidden_layers", "intermediate_size"}) {
    for (const char* bad :
         {"0", "-4", "1.5", "true", "\"8\"", "[8]", "99999999999", "18446744073709551615"}) {
      const std::string entry = std::string("\"") + key + "\":" + bad;
      expect_error(ErrorCode::kIo, {key, "legal are integers from 1", "config.json"},
                   [&] { read(config("MixtralForCausalLM", entry)); });
    }
    const std::string absent = std::string("\"") + key + "\":null";
    expect_error(ErrorCode::kIo, {"config.json", "lacks"},
                 [&] { read(config("MixtralForCausalLM", absent)); });
  }
  expect_error(ErrorCode::kIo, {"num_experts_per_tok = '9'", "from 1 to 8"},
               [&] { read(config("MixtralForCausalLM", R"("num_experts_per_tok":9)")); });
}

TEST(ModelConfig, RefusesWhatItDoesNotKnow) {
  expect_error(ErrorCode::kUnsupported, {"'LlamaForCausalLM'", "Qwen3MoeForCausalLM"},
               [&] { read(config("LlamaForCausalLM", "")); });
  expect_error(ErrorCode::kUnsupported, {"hidden_act", "gelu"},
               [&] { read(config("MixtralForCausalLM", R"("hidden_act":"gelu")")); });
  expect_error(ErrorCode::kUnsupported, {"quant_method", "gptq"}, [&] {
    read(config("MixtralForCausalLM", R"("quantization_config":{"quant_method":"gptq"})"));
  });
  expect_error(ErrorCode::kUnsupported, {"weight_block_size", "[64,128]"}, [&] {
    read(config("DeepseekV3ForCausalLM",
                R"("quantization_config":{"quant_method":"fp8","weight_block_size":[64,128]})"));
  });
  expect_error(ErrorCode::kUnsupported, {"weight_block_size"}, [&] {
    read(config("DeepseekV3ForCausalLM", R"("quantization_config":{"quant_method":"fp8"})"));
  });
}

TEST(ModelConfig, RefusesTextThatIsNoConfiguration) {
  for (const char* text : {"", "{", "[]", "3", "null", "{}", R"({"architectures":[]})",
                           R"({"architectures":"MixtralForCausalLM"})", R"({"architectures":[3]})",
                           "{\"architectures\":[\"\xFF\"]}",
                           R"({"architectures":["MixtralForCausalLM"],"quantization_config":3})"}) {
    expect_error(ErrorCode::kIo, {"config.json"}, [&] { read(text); });
  }
  expect_error(ErrorCode::kIo, {"nests deeper"},
               [&] { read("{\"a\":" + std::string(1'000'000, '[')); });
  expect_error(ErrorCode::kIo, {"at most 4194304"},
               [&] { read("{}" + std::string(4 << 20, ' ')); });
}

}  // namespace
}  // namespace distmoe
