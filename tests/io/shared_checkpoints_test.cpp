// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the four real checkpoints open as their README says, and the elements of their experts
// are where an independent reading of the file puts them.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "formats/bf16.hpp"
#include "io/checkpoint.hpp"
#include "io/routed_input.hpp"
#include "io/safetensors.hpp"

namespace distmoe {
namespace {

struct SharedCheckpoint {
  const char* folder;
  const char* architecture;
  LayerShape shape;
};

const SharedCheckpoint kShared[] = {
    {"qwen3moe", "Qwen3MoeForCausalLM", {16, 4, 256, 256, Activation::kSwiGLU, 1.702, 7.0, false}},
    {"mixtral", "MixtralForCausalLM", {8, 2, 256, 512, Activation::kSwiGLU, 1.702, 7.0, false}},
    {"gptoss", "GptOssForCausalLM", {8, 4, 192, 192, Activation::kSwiGLUClamped, 1.702, 7.0, true}},
    {"deepseekv3",
     "DeepseekV3ForCausalLM",
     {32, 8, 256, 128, Activation::kSwiGLU, 1.702, 7.0, false}},
};

/// BF16 elements of a tensor, addressed by flat index.
class Elements {
 public:
  explicit Elements(const StoredTensor& tensor) : data_(tensor.data) {}
  std::uint16_t operator[](std::int64_t i) const {
    std::uint16_t bits = 0;
    std::memcpy(&bits, &data_[static_cast<std::size_t>(i) * 2], sizeof(bits));
    return bits;
  }

 private:
  std::span<const std::byte> data_;
};

class SharedCheckpoints : public ::testing::TestWithParam<SharedCheckpoint> {
 protected:
  void SetUp() override {
    directory_ = std::filesystem::path(DISTMOE_SHARED_DATA) / GetParam().folder;
    if (!std::filesystem::exists(directory_ / "config.json")) {
      GTEST_SKIP() << directory_ << " is absent";
    }
  }

  /// Element [expert, row, col] of role 0 (gate), 1 (up) or 2 (down), read from the file.
  std::uint16_t stored(const SafetensorsFile& file, std::int64_t layer, std::int64_t expert,
                       int role, std::int64_t row, std::int64_t col) const {
    const LayerShape& shape = GetParam().shape;
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    if (shape.has_bias) {
      const std::int64_t d = shape.hidden_dim;
      const std::int64_t f = shape.intermediate_dim;
      const bool is_down = role == 2;
      const char* name = is_down ? "mlp.experts.down_proj" : "mlp.experts.gate_up_proj";
      const Elements elements(*file.find(prefix + name));
      return is_down ? elements[(expert * f + col) * d + row]
                     : elements[(expert * d + col) * 2 * f + 2 * row + role];
    }
    const bool is_mixtral = std::string(GetParam().folder) == "mixtral";
    const char* suffix[2][3] = {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}};
    const std::string block = is_mixtral ? "block_sparse_moe" : "mlp";
    const Elements elements(*file.find(prefix + block + ".experts." + std::to_string(expert) + "." +
                                       suffix[is_mixtral][role] + ".weight"));
    const std::int64_t cols = role == 2 ? shape.intermediate_dim : shape.hidden_dim;
    return elements[row * cols + col];
  }

  std::filesystem::path directory_;
};

TEST_P(SharedCheckpoints, OpensWithItsArchitectureAndShape) {
  const Checkpoint checkpoint = Checkpoint::open(directory_);
  EXPECT_EQ(checkpoint.architecture(), GetParam().architecture);
  EXPECT_EQ(checkpoint.shape(), GetParam().shape);
  EXPECT_EQ(checkpoint.moe_layers(), (std::vector<std::int64_t>{0, 1}));
}

TEST_P(SharedCheckpoints, LoadsExpertsElementByElement) {
  const Checkpoint checkpoint = Checkpoint::open(directory_);
  const SafetensorsFile file = SafetensorsFile::open(directory_ / "model.safetensors");
  const LayerShape& shape = GetParam().shape;
  for (const std::int64_t layer : {0, 1}) {
    const LoadedExperts experts = checkpoint.load_experts(layer, 1, shape.num_experts - 1);
    const auto* w13 = reinterpret_cast<const BF16*>(experts.w13.data());
    const auto* w2 = reinterpret_cast<const BF16*>(experts.w2.data());
    std::int64_t num_differences = 0;
    for (std::int64_t expert = 1; expert < shape.num_experts; ++expert) {
      for (const int role : {0, 1}) {
        for (std::int64_t row = 0; row < shape.intermediate_dim; row += 5) {
          for (std::int64_t col = 0; col < shape.hidden_dim; col += 3) {
            const std::int64_t at =
                ((expert - 1) * 2 + role) * shape.intermediate_dim * shape.hidden_dim +
                row * shape.hidden_dim + col;
            num_differences += w13[at].bits != stored(file, layer, expert, role, row, col);
          }
        }
      }
      for (std::int64_t row = 0; row < shape.hidden_dim; row += 3) {
        for (std::int64_t col = 0; col < shape.intermediate_dim; col += 5) {
          const std::int64_t at =
              ((expert - 1) * shape.hidden_dim + row) * shape.intermediate_dim + col;
          num_differences += w2[at].bits != stored(file, layer, expert, 2, row, col);
        }
      }
    }
    EXPECT_EQ(num_differences, 0) << "layer " << layer;
  }
}

TEST_P(SharedCheckpoints, ReadsTheCapturedCalls) {
  const LayerShape& shape = GetParam().shape;
  for (const std::int64_t layer : {0, 1}) {
    const auto input = RoutedInputFile::open(directory_ / "routed_experts.safetensors", layer);
    EXPECT_EQ(input.num_tokens(), 512);
    EXPECT_EQ(input.hidden_dim(), shape.hidden_dim);
    EXPECT_EQ(input.top_k(), shape.top_k);
    EXPECT_TRUE(input.y_ref().is_given());
    const auto* ids = static_cast<const std::int32_t*>(input.input().topk_ids_TK.data);
    for (std::int64_t i = 0; i < 512 * shape.top_k; ++i) {
      ASSERT_GE(ids[i], 0);
      ASSERT_LT(ids[i], shape.num_experts);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, SharedCheckpoints, ::testing::ValuesIn(kShared),
                         [](const auto& tested) { return std::string(tested.param.folder); });

}  // namespace
}  // namespace distmoe
