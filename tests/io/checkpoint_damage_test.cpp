// SPDX-License-Identifier: Apache-2.0
//
// Invariant: every expected tensor is consumed exactly once. What is missing, left over, of another
// type or shape, or scaled by no number is an error that names tensor, expert and file.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "io/checkpoint.hpp"
#include "io/expect_error.hpp"
#include "io/temporary_directory.hpp"
#include "io/tiny_model.hpp"

namespace distmoe {
namespace {

using testing::expect_error;
using testing::make_tensor;
using testing::OwnedTensor;
using testing::TemporaryDirectory;
using testing::TinyModel;

constexpr TinyModel kModel{.num_experts = 4, .d = 32, .f = 64};

std::vector<OwnedTensor> qwen() { return kModel.per_expert(0, TinyModel::projection_name); }

OwnedTensor& find(std::vector<OwnedTensor>& tensors, const std::string& name) {
  const auto place = std::ranges::find(tensors, name, &OwnedTensor::name);
  if (place == tensors.end()) throw std::runtime_error("the test has no tensor " + name);
  return *place;
}

void drop(std::vector<OwnedTensor>& tensors, const std::string& name) {
  find(tensors, name);
  std::erase_if(tensors, [&](const OwnedTensor& tensor) { return tensor.name == name; });
}

void expect_refused(const char* architecture, const std::vector<OwnedTensor>& tensors,
                    std::initializer_list<std::string_view> fragments) {
  const TemporaryDirectory directory;
  kModel.write(directory, architecture, tensors);
  expect_error(ErrorCode::kIo, fragments, [&] { Checkpoint::open(directory.path()); });
}

// reports: A127
TEST(CheckpointDamage, ListsExpectedAndFoundWhenAKeyIsRenamed) {
  std::vector<OwnedTensor> tensors = qwen();
  find(tensors, "model.layers.0.mlp.experts.2.up_proj.weight").name =
      "model.layers.0.mlp.experts.2.up.weight";
  expect_refused("Qwen3MoeForCausalLM", tensors,
                 {"missing (1)", "model.layers.0.mlp.experts.2.up_proj.weight", "not expected (1)",
                  "model.layers.0.mlp.experts.2.up.weight", "/model.safetensors"});
}

// reports: A73
TEST(CheckpointDamage, NamesEachMissingTensor) {
  for (const OwnedTensor& victim : qwen()) {
    std::vector<OwnedTensor> tensors = qwen();
    drop(tensors, victim.name);
    expect_refused("Qwen3MoeForCausalLM", tensors, {"missing (1)", victim.name});
  }
  for (const OwnedTensor& victim : kModel.gpt_oss(0)) {
    std::vector<OwnedTensor> tensors = kModel.gpt_oss(0);
    drop(tensors, victim.name);
    expect_refused("GptOssForCausalLM", tensors, {"missing (1)", victim.name});
  }
  for (const OwnedTensor& victim : kModel.mxfp4(0)) {
    std::vector<OwnedTensor> tensors = kModel.mxfp4(0);
    drop(tensors, victim.name);
    expect_refused("GptOssForCausalLM", tensors, {"missing (1)", victim.name});
  }
}

TEST(CheckpointDamage, NamesAMissingScaleAndAScaleWithoutUse) {
  std::vector<OwnedTensor> tensors = kModel.fp8(0);
  const std::string scale = "model.layers.0.mlp.experts.3.down_proj.weight_scale_inv";
  drop(tensors, scale);
  expect_refused("DeepseekV3ForCausalLM", tensors, {"missing (1)", scale});
  std::vector<OwnedTensor> bf16 = qwen();
  bf16.push_back(make_tensor(scale, DType::kF32, {1, 1}, std::vector<float>{1.0f}));
  expect_refused("DeepseekV3ForCausalLM", bf16, {"not expected (1)", scale});
}

TEST(CheckpointDamage, RefusesALayerWithoutExperts) {
  expect_refused("MixtralForCausalLM", {}, {"missing (12, of which the first)", "gate_proj"});
  const TemporaryDirectory directory;
  kModel.write(directory, "MixtralForCausalLM", qwen(), "", 2);
  expect_error(ErrorCode::kIo, {"missing", "model.layers.1.mlp.experts.0.gate_proj.weight"},
               [&] { Checkpoint::open(directory.path()); });
}

TEST(CheckpointDamage, RefusesExpertLikeTensorsThatNobodyReads) {
  for (const char* name :
       {"model.layers.0.mlp.experts.4.gate_proj.weight",   // one expert more than the config has
        "model.layers.0.mlp.experts.01.gate_proj.weight",  // a second spelling of expert 1
        "model.layers.0.mlp.experts.-1.gate_proj.weight",
        "model.layers.0.mlp.experts.1.gate_proj.weight_scale_2",
        "model.layers.0.mlp.experts.1.gate_proj.bias",
        "model.layers.0.mlp.experts.gate_up_proj",  // fused beside per-expert
        "model.layers.0.block_sparse_moe.experts.0.w1.weight",
        "model.layers.1.mlp.experts.0.gate_proj.weight",  // no such layer
        "model.layers.00.mlp.experts.0.gate_proj.weight",
        "model.layers.99999999999999999999.mlp.experts.0.gate_proj.weight",
        "language_model.layers.0.mlp.experts.0.gate_proj.weight", "experts",
        "model.layers.0.mlp.expert_bias"}) {
    std::vector<OwnedTensor> tensors = qwen();
    tensors.push_back(make_tensor(name, DType::kU8, {1}, std::vector<std::uint8_t>{1}));
    expect_refused("Qwen3MoeForCausalLM", tensors,
                   {"not expected (1)", std::string("'") + name + "'", "/model.safetensors"});
  }
}

TEST(CheckpointDamage, PassesOverRoutersAndSharedExperts) {
  std::vector<OwnedTensor> tensors = qwen();
  for (const char* name :
       {"model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.e_score_correction_bias",
        "model.layers.0.mlp.shared_experts.gate_proj.weight",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
        "model.layers.0.mlp.shared_expert_gate.weight", "model.layers.0.mlp.router.weight",
        "model.layers.0.self_attn.q_proj.weight", "model.layers.7.mlp.down_proj.weight", ""}) {
    tensors.push_back(make_tensor(name, DType::kU8, {1}, std::vector<std::uint8_t>{1}));
  }
  const TemporaryDirectory directory;
  kModel.write(directory, "DeepseekV3ForCausalLM", tensors);
  EXPECT_EQ(Checkpoint::open(directory.path()).moe_layers(), std::vector<std::int64_t>{0});
}

TEST(CheckpointDamage, NamesTensorExpertAndFileOfAWrongShapeOrType) {
  const std::string name = "model.layers.0.mlp.experts.2.gate_proj.weight";
  const auto with = [&](DType dtype, std::vector<std::int64_t> shape) {
    std::vector<OwnedTensor> tensors = qwen();
    OwnedTensor& tensor = find(tensors, name);
    std::size_t num_bytes = size_of(dtype);
    for (const std::int64_t extent : shape) num_bytes *= static_cast<std::size_t>(extent);
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    tensor.data.assign(num_bytes, std::byte{0});
    return tensors;
  };
  const auto expect = [&](DType dtype, std::vector<std::int64_t> shape, std::string_view found) {
    expect_refused("Qwen3MoeForCausalLM", with(dtype, std::move(shape)),
                   {name, "expert 2", "/model.safetensors", found, "BF16 or F8_E4M3 [64, 32]"});
  };
  expect(DType::kBF16, {32, 64}, "BF16 [32, 64]");
  expect(DType::kBF16, {64, 33}, "BF16 [64, 33]");
  expect(DType::kBF16, {2048}, "BF16 [2048]");
  expect(DType::kBF16, {1, 64, 32}, "BF16 [1, 64, 32]");
  expect(DType::kF32, {64, 32}, "F32 [64, 32]");
  expect(DType::kF16, {64, 32}, "F16 [64, 32]");
  expect(DType::kF8E5M2, {64, 32}, "F8_E5M2 [64, 32]");
}

// A transposed or halved fused tensor, the mistakes of A129, must not load.
TEST(CheckpointDamage, RefusesFusedTensorsOfAnotherLayout) {
  for (const OwnedTensor& victim : kModel.mxfp4(0) + kModel.gpt_oss(0)) {
    const bool is_mxfp4 = victim.dtype == DType::kU8;
    std::vector<OwnedTensor> tensors = is_mxfp4 ? kModel.mxfp4(0) : kModel.gpt_oss(0);
    std::swap(find(tensors, victim.name).shape[0], find(tensors, victim.name).shape[1]);
    expect_refused("GptOssForCausalLM", tensors, {victim.name, "config.json asks for"});
  }
  std::vector<OwnedTensor> fused = kModel.fused(0);
  std::swap(fused[0].shape[1], fused[0].shape[2]);
  const bool is_square = fused[0].shape[1] == fused[0].shape[2];
  ASSERT_FALSE(is_square);
  expect_refused("MixtralForCausalLM", fused, {fused[0].name, "config.json asks for"});
}

// reports: A69
TEST(CheckpointDamage, RefusesFp8ScalesThatAreNoNumber) {
  const TinyModel model{.num_experts = 3, .d = 130, .f = 260};
  const std::string name = "model.layers.0.mlp.experts.1.up_proj.weight_scale_inv";
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<OwnedTensor> tensors = model.fp8(0);
    std::memcpy(&find(tensors, name).data[5 * sizeof(float)], &bad,
                sizeof(bad));  // [2, 1] of [3, 2]
    const TemporaryDirectory directory;
    model.write(directory, "DeepseekV3ForCausalLM", tensors);
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    expect_error(
        ErrorCode::kIo,
        {name, "expert 1", "scale [2, 1]", "/model.safetensors", std::isnan(bad) ? "nan" : "inf"},
        [&] { checkpoint.load_experts(0, 0, 3); });
    EXPECT_EQ(checkpoint.load_experts(0, 0, 1).num_experts, 1) << "expert 0 is sound";
    EXPECT_EQ(checkpoint.load_experts(0, 2, 1).num_experts, 1) << "expert 2 is sound";
  }
}

// reports: A69, A129
TEST(CheckpointDamage, RefusesMxfp4ScaleBytesFrom253) {
  const TinyModel model{.num_experts = 3, .d = 64, .f = 96};
  const std::string name = "model.layers.0.mlp.experts.down_proj_scales";  // [3, 64, 3]
  for (const int byte : {252, 253, 254, 255}) {
    std::vector<OwnedTensor> tensors = model.mxfp4(0);
    find(tensors, name).data[1 * 64 * 3 + 7 * 3 + 2] = static_cast<std::byte>(byte);
    const TemporaryDirectory directory;
    model.write(directory, "GptOssForCausalLM", tensors);
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    if (byte == 252) {
      EXPECT_EQ(checkpoint.load_experts(0, 0, 3).num_experts, 3);
      continue;
    }
    expect_error(ErrorCode::kIo,
                 {name, "expert 1", "scale [1, 7, 2]", "byte " + std::to_string(byte)},
                 [&] { checkpoint.load_experts(0, 0, 3); });
    EXPECT_EQ(checkpoint.load_experts(0, 2, 1).num_experts, 1) << "expert 2 is sound";
  }
}

TEST(CheckpointDamage, RefusesMxfp4WidthsThatAreNoWholeBlocks) {
  const TinyModel model{.num_experts = 3, .d = 64, .f = 48};
  const TemporaryDirectory directory;
  std::vector<OwnedTensor> tensors = kModel.mxfp4(0);
  model.write(directory, "GptOssForCausalLM", tensors);
  expect_error(ErrorCode::kUnsupported, {"F = 48", "multiples of 32"},
               [&] { Checkpoint::open(directory.path()); });
}

TEST(CheckpointDamage, RefusesLayersAndExpertsThatAreNotThere) {
  const TemporaryDirectory directory;
  kModel.write(directory, "Qwen3MoeForCausalLM", qwen());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t layer : {std::int64_t{-1}, std::int64_t{1}, kMax}) {
    expect_error(ErrorCode::kInvalidArgument,
                 {"layer " + std::to_string(layer), "layers that have are 0"},
                 [&] { checkpoint.load_experts(layer, 0, 1); });
  }
  const std::vector<std::pair<std::int64_t, std::int64_t>> bad = {
      {-1, 1}, {0, 5}, {4, 1}, {5, 0}, {0, -1}, {kMax, kMax}, {1, kMax}, {kMax, 1}, {-kMax, kMax}};
  for (const auto& [first, count] : bad) {
    expect_error(ErrorCode::kInvalidArgument, {"has 4 in each layer"},
                 [&] { checkpoint.load_experts(0, first, count); });
  }
}

}  // namespace
}  // namespace distmoe
