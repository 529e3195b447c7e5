// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a layer of a checkpoint that has codes of the precision is computed with those codes,
// and with the bits of the same weights in BF16 where quantising them is exact; where the codes
// would not do the weights are quantised from BF16.
#include "layer_weights.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "distmoe/context.hpp"
#include "io/tiny_model.hpp"
#include "layer_config.hpp"

namespace distmoe::tools {
namespace {

using distmoe::testing::OwnedTensor;
using distmoe::testing::TemporaryDirectory;
using distmoe::testing::TinyModel;

// More than one block of 128 x 128, the last of them partial.
const TinyModel kModel{.num_experts = 3, .d = 160, .f = 192};

/// A written checkpoint.
class Stored {
 public:
  Stored(const std::string& architecture, const std::vector<OwnedTensor>& tensors,
         const std::string& quantization = "") {
    kModel.write(directory_, architecture, tensors, quantization);
  }
  Checkpoint open() const { return Checkpoint::open(directory_.path()); }

 private:
  TemporaryDirectory directory_;
};

Stored plain() { return {"Qwen3MoeForCausalLM", kModel.per_expert(0, TinyModel::projection_name)}; }
Stored coded(const std::string& format) {
  return {"Qwen3MoeForCausalLM", kModel.block_scaled(0, format), TinyModel::quantization(format)};
}

WeightRequest all_experts(Precision precision, bool inference = true) {
  return {.num_experts = kModel.num_experts, .precision = precision, .inference = inference};
}

/// y of tokens that go to every expert.
std::vector<BF16> y_of(const Checkpoint& checkpoint, const WeightRequest& request,
                       bool has_stored_codes) {
  constexpr std::int64_t kTokens = 5;
  const LayerWeights weights(checkpoint, request);
  EXPECT_EQ(weights.has_stored_codes(), has_stored_codes);
  Config config = layer_config(checkpoint.shape(), kTokens, kModel.num_experts, 1);
  config.precision = request.precision;
  config.inference = request.inference;
  std::vector<BF16> x;
  x.reserve(static_cast<std::size_t>(kTokens * kModel.d));
  for (std::int64_t i = 0; i < kTokens * kModel.d; ++i) {
    x.push_back(to_bf16(static_cast<float>(i * 37 % 101 - 50) / 64.0F));
  }
  std::vector<std::int32_t> ids;
  std::vector<float> scores;
  for (std::int64_t i = 0; i < kTokens * kModel.num_experts; ++i) {
    ids.push_back(static_cast<std::int32_t>(i % kModel.num_experts));
    scores.push_back(0.25F + static_cast<float>(i) / 64.0F);
  }
  std::vector<BF16> y(x.size());
  Context context = Context::create(config);
  routed_experts(context,
                 {{x.data(), DType::kBF16, {kTokens, kModel.d}},
                  {ids.data(), DType::kI32, {kTokens, kModel.num_experts}},
                  {scores.data(), DType::kF32, {kTokens, kModel.num_experts}}},
                 weights.view(), {y.data(), DType::kBF16, {kTokens, kModel.d}});
  return y;
}

void expect_same_bits(const std::vector<BF16>& a, const std::vector<BF16>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) ASSERT_EQ(a[i].bits, b[i].bits) << i;
  EXPECT_NE(a[0].bits & 0x7FFF, 0);
}

TEST(LayerWeights, TakesTheCodesOfTheCheckpoint) {
  const Checkpoint bf16 = plain().open();
  for (const auto& [format, precision] :
       {std::pair("mxfp8", Precision::kMXFP8), {"mxfp4", Precision::kMXFP4}}) {
    SCOPED_TRACE(format);
    const Stored stored = coded(format);
    expect_same_bits(y_of(stored.open(), all_experts(precision), true),
                     y_of(bf16, all_experts(precision), false));
  }
}

/// Quantising again what NVFP4 decodes to gives other codes: those of the file are used, with a
/// global scale for the gate and another for the up rows.
TEST(LayerWeights, ViewsNvfp4AsItIsStored) {
  const Stored stored = coded("nvfp4");
  const Checkpoint checkpoint = stored.open();
  const LayerWeights weights(checkpoint, all_experts(Precision::kNVFP4));
  const ExpertWeights view = weights.view();
  EXPECT_FALSE(view.w13_L2FD.is_given());
  EXPECT_TRUE(view.prepared_w13.has_known_scales);
  EXPECT_NO_THROW(check_scales(view.prepared_w13));
  EXPECT_NO_THROW(check_scales(view.prepared_w2));
  EXPECT_EQ(view.prepared_w13.global_scales.shape[1], 2);
  const CodedExperts coded = checkpoint.load_coded_experts(0, 0, kModel.num_experts);
  for (const auto& [array, bytes] : {std::pair(view.prepared_w13.codes, &coded.w13.codes),
                                     {view.prepared_w13.scales, &coded.w13.scales},
                                     {view.prepared_w13.global_scales, &coded.w13.global_scales},
                                     {view.prepared_w2.codes, &coded.w2.codes},
                                     {view.prepared_w2.scales, &coded.w2.scales},
                                     {view.prepared_w2.global_scales, &coded.w2.global_scales}}) {
    ASSERT_EQ(array.num_bytes(), bytes->num_bytes());
    EXPECT_EQ(std::memcmp(array.data, bytes->data(), bytes->num_bytes()), 0);
  }
  EXPECT_EQ(weights.num_bytes(), coded.num_bytes());
  y_of(checkpoint, all_experts(Precision::kNVFP4), true);
}

TEST(LayerWeights, TakesFp8WhoseScalesArePowersOfTwo) {
  const Checkpoint bf16 = plain().open();
  std::vector<OwnedTensor> tensors = kModel.fp8(0);
  const Stored powers("DeepseekV3ForCausalLM", tensors);
  for (const bool inference : {true, false}) {
    expect_same_bits(y_of(powers.open(), all_experts(Precision::kMXFP8, inference), true),
                     y_of(bf16, all_experts(Precision::kMXFP8, inference), false));
  }
  const std::string name = TinyModel::projection_name(0, 1, TinyModel::kUp) + "_scale_inv";
  for (OwnedTensor& tensor : tensors) {
    const float odd = 0.3F;
    if (tensor.name == name) std::memcpy(tensor.data.data(), &odd, sizeof(odd));
  }
  const Stored others("DeepseekV3ForCausalLM", tensors);
  y_of(others.open(), all_experts(Precision::kMXFP8), false);
}

TEST(LayerWeights, KeepsBiasesAndRanksWithoutExperts) {
  const Stored fused("GptOssForCausalLM", kModel.mxfp4(0), TinyModel::quantization("mxfp4"));
  const Stored bf16("GptOssForCausalLM", kModel.gpt_oss(0));
  expect_same_bits(y_of(fused.open(), all_experts(Precision::kMXFP4), true),
                   y_of(bf16.open(), all_experts(Precision::kMXFP4), false));
  const LayerWeights none(fused.open(),
                          {.first_expert = 3, .num_experts = 0, .precision = Precision::kMXFP4});
  EXPECT_TRUE(none.has_stored_codes());
  EXPECT_TRUE(none.view().prepared_w13.is_given());
  EXPECT_EQ(none.view().prepared_w2.codes.describe(), "uint8 [0, 160, 96]");
}

TEST(LayerWeights, QuantisesWhatIsStoredOtherwise) {
  const Stored mxfp8 = coded("mxfp8");
  const Checkpoint bf16 = plain().open();
  // Scales of rows are none of tiles.
  expect_same_bits(y_of(mxfp8.open(), all_experts(Precision::kMXFP8, false), false),
                   y_of(bf16, all_experts(Precision::kMXFP8, false), false));
  expect_same_bits(y_of(mxfp8.open(), all_experts(Precision::kNVFP4), false),
                   y_of(bf16, all_experts(Precision::kNVFP4), false));
  expect_same_bits(y_of(coded("nvfp4").open(), all_experts(Precision::kBF16), false),
                   y_of(bf16, all_experts(Precision::kBF16), false));
}

}  // namespace
}  // namespace distmoe::tools
