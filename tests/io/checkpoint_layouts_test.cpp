// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the same weights give the same bytes in BF16, gate rows first, whatever names, layout
// and precision a checkpoint stores them in.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "formats/bf16.hpp"
#include "io/checkpoint.hpp"
#include "io/temporary_directory.hpp"
#include "io/tiny_model.hpp"

namespace distmoe {
namespace {

using testing::OwnedTensor;
using testing::TemporaryDirectory;
using testing::TinyModel;

void expect_same(const TensorView& loaded, const std::vector<BF16>& expected) {
  ASSERT_EQ(loaded.dtype, DType::kBF16);
  ASSERT_EQ(loaded.num_bytes(), expected.size() * sizeof(BF16));
  const auto* values = static_cast<const BF16*>(loaded.data);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(values[i].bits, expected[i].bits) << "element " << i;
  }
}

/// Loads every slice of the experts, one to all of them, and compares.
void expect_loads(const TinyModel& model, const TemporaryDirectory& directory,
                  std::int64_t layer = 0) {
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  for (std::int64_t first = 0; first <= model.num_experts; ++first) {
    for (std::int64_t count = 0; first + count <= model.num_experts; ++count) {
      const LoadedExperts experts = checkpoint.load_experts(layer, first, count);
      const ExpertWeights weights = experts.view();
      SCOPED_TRACE(std::to_string(first) + " + " + std::to_string(count));
      EXPECT_EQ(weights.w13_L2FD.shape[0], count);
      EXPECT_EQ(weights.w13_L2FD.shape[1], 2 * model.f);
      EXPECT_EQ(weights.w13_L2FD.shape[2], model.d);
      EXPECT_EQ(weights.w2_LDF.shape[1], model.d);
      EXPECT_EQ(weights.w2_LDF.shape[2], model.f);
      expect_same(weights.w13_L2FD, model.w13(layer, first, count));
      expect_same(weights.w2_LDF, model.w2(layer, first, count));
    }
  }
}

void expect_biases(const TinyModel& model, const TemporaryDirectory& directory, DType dtype) {
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  const LoadedExperts experts = checkpoint.load_experts(0, 1, 3);
  const ExpertWeights weights = experts.view();
  ASSERT_EQ(weights.bias13_L2F.dtype, dtype);
  ASSERT_EQ(weights.bias2_LD.dtype, dtype);
  const auto value = [dtype](const TensorView& view, std::int64_t i) {
    if (dtype == DType::kF32) return static_cast<const float*>(view.data)[i];
    return to_float(static_cast<const BF16*>(view.data)[i]);
  };
  const auto stored = [dtype](float v) { return dtype == DType::kF32 ? v : to_float(to_bf16(v)); };
  for (std::int64_t local = 0; local < 3; ++local) {
    for (std::int64_t row = 0; row < 2 * model.f; ++row) {
      ASSERT_EQ(value(weights.bias13_L2F, local * 2 * model.f + row),
                stored(TinyModel::bias13(0, local + 1, row)))
          << local << ' ' << row;
    }
    for (std::int64_t row = 0; row < model.d; ++row) {
      ASSERT_EQ(value(weights.bias2_LD, local * model.d + row),
                stored(TinyModel::bias2(0, local + 1, row)));
    }
  }
}

// reports: A128, A116
TEST(CheckpointLayouts, LoadsMixtralNames) {
  const TinyModel model{.num_experts = 5, .d = 6, .f = 3};
  const TemporaryDirectory directory;
  model.write(directory, "MixtralForCausalLM", model.per_expert(0, TinyModel::mixtral_name));
  expect_loads(model, directory);
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  EXPECT_EQ(checkpoint.architecture(), "MixtralForCausalLM");
  EXPECT_EQ(checkpoint.shape(), (LayerShape{5, 2, 6, 3, Activation::kSwiGLU, 1.702, 7.0, false}));
  EXPECT_FALSE(checkpoint.load_experts(0, 0, 1).view().bias13_L2F.is_given());
}

// reports: A128
TEST(CheckpointLayouts, LoadsProjectionNamesOfThreeArchitectures) {
  const TinyModel model{.num_experts = 5, .d = 3, .f = 7};
  for (const char* architecture :
       {"Qwen3MoeForCausalLM", "OlmoeForCausalLM", "DeepseekV3ForCausalLM"}) {
    SCOPED_TRACE(architecture);
    const TemporaryDirectory directory;
    model.write(directory, architecture, model.per_expert(0, TinyModel::projection_name));
    expect_loads(model, directory);
  }
}

// reports: A127, A128
TEST(CheckpointLayouts, LoadsFusedTensorsOfFourArchitectures) {
  const TinyModel model{.num_experts = 4, .d = 10, .f = 5};  // square: D = 2F
  for (const char* architecture :
       {"MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM", "DeepseekV3ForCausalLM"}) {
    for (const char* block : {"mlp", "block_sparse_moe"}) {
      SCOPED_TRACE(std::string(architecture) + ' ' + block);
      const TemporaryDirectory directory;
      model.write(directory, architecture, model.fused(0, block));
      expect_loads(model, directory);
    }
  }
}

// D = 2F makes the transposed tensor as square as the other: orientation must come from the name.
TEST(CheckpointLayouts, LoadsGptOssTransposedAndInterleaved) {
  for (const TinyModel& model : {TinyModel{.num_experts = 4, .d = 10, .f = 5},
                                 TinyModel{.num_experts = 4, .d = 70, .f = 130}}) {
    const TemporaryDirectory directory;
    model.write(directory, "GptOssForCausalLM", model.gpt_oss(0));
    expect_loads(model, directory);
    expect_biases(model, directory, DType::kBF16);
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    EXPECT_EQ(checkpoint.shape().activation, Activation::kSwiGLUClamped);
    EXPECT_TRUE(checkpoint.shape().has_bias);
  }
}

TEST(CheckpointLayouts, KeepsFp32Biases) {
  const TinyModel model{.num_experts = 4, .d = 6, .f = 3};
  const TemporaryDirectory directory;
  model.write(directory, "GptOssForCausalLM", model.gpt_oss(0, DType::kF32));
  expect_biases(model, directory, DType::kF32);
}

// reports: A129
TEST(CheckpointLayouts, LoadsGptOssMxfp4) {
  for (const TinyModel& model : {TinyModel{.num_experts = 4, .d = 64, .f = 32},
                                 TinyModel{.num_experts = 4, .d = 96, .f = 160}}) {
    const TemporaryDirectory directory;
    model.write(directory, "GptOssForCausalLM", model.mxfp4(0),
                R"(,"quantization_config":{"quant_method":"mxfp4"},"swiglu_limit":5.5)");
    expect_loads(model, directory);
    expect_biases(model, directory, DType::kBF16);
    EXPECT_EQ(Checkpoint::open(directory.path()).shape().swiglu_limit, 5.5);
  }
}

// reports: A44
TEST(CheckpointLayouts, LoadsFp8WithPartialBlocks) {
  for (const DType scale_dtype : {DType::kF32, DType::kBF16}) {
    const TinyModel model{.num_experts = 3, .d = 130, .f = 192};
    const TemporaryDirectory directory;
    model.write(directory, "DeepseekV3ForCausalLM", model.fp8(0, scale_dtype),
                R"(,"quantization_config":{"quant_method":"fp8","weight_block_size":[128,128]})");
    expect_loads(model, directory);
  }
}

// reports: A128
TEST(CheckpointLayouts, GivesTheSameBytesForEverySpelling) {
  const TinyModel model{.num_experts = 3, .d = 160, .f = 96};
  struct Case {
    const char* architecture;
    std::vector<OwnedTensor> tensors;
  };
  const std::vector<Case> cases = {
      {"MixtralForCausalLM", model.per_expert(0, TinyModel::mixtral_name)},
      {"Qwen3MoeForCausalLM", model.per_expert(0, TinyModel::projection_name)},
      {"OlmoeForCausalLM", model.fused(0)},
      {"DeepseekV3ForCausalLM", model.fp8(0)},
      {"GptOssForCausalLM", model.gpt_oss(0)},
      {"GptOssForCausalLM", model.mxfp4(0)},
  };
  for (const Case& spelled : cases) {
    SCOPED_TRACE(spelled.architecture);
    const TemporaryDirectory directory;
    model.write(directory, spelled.architecture, spelled.tensors);
    const LoadedExperts experts = Checkpoint::open(directory.path()).load_experts(0, 0, 3);
    expect_same(experts.view().w13_L2FD, model.w13(0, 0, 3));
    expect_same(experts.view().w2_LDF, model.w2(0, 0, 3));
  }
}

// Experts that use two precisions side by side, as checkpoints with some layers left in BF16 do.
TEST(CheckpointLayouts, LoadsFp8AndBf16LayersOfOneCheckpoint) {
  const TinyModel model{.num_experts = 3, .d = 6, .f = 4};
  const TemporaryDirectory directory;
  model.write(directory, "DeepseekV3ForCausalLM",
              model.fp8(0) + model.per_expert(1, TinyModel::projection_name) + model.fused(2), "",
              3);
  for (const std::int64_t layer : {0, 1, 2}) expect_loads(model, directory, layer);
}

}  // namespace
}  // namespace distmoe
