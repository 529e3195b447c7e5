// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a checkpoint of MXFP8, MXFP4 or NVFP4 experts loads as the BF16 values that it means
// and, as codes, byte for byte as it lies in the file; what is damaged is refused with its place.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "io/checkpoint.hpp"
#include "io/expect_error.hpp"
#include "io/tiny_model.hpp"

namespace distmoe {
namespace {

using testing::expect_error;
using testing::OwnedTensor;
using testing::TemporaryDirectory;
using testing::TinyModel;

const TinyModel kModel{.num_experts = 4, .d = 96, .f = 64};
constexpr const char* kFormats[] = {"mxfp8", "mxfp4", "nvfp4"};

std::vector<std::uint8_t> bytes_of(const TensorStorage& storage) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(storage.data());
  return {bytes, bytes + storage.num_bytes()};
}

std::vector<BF16> values_of(const TensorStorage& storage) {
  std::vector<BF16> values(storage.num_bytes() / sizeof(BF16));
  std::memcpy(values.data(), storage.data(), storage.num_bytes());
  return values;
}

void expect_equal(const std::vector<BF16>& actual, const std::vector<BF16>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].bits, expected[i].bits) << i;
  }
}

void append(std::vector<std::uint8_t>& all, const std::vector<std::uint8_t>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

/// Codes and scales of the experts [first, first + count) as the model makes them.
struct Expected {
  Expected(const std::string& format, std::int64_t first, std::int64_t count) {
    for (std::int64_t expert = first; expert < first + count; ++expert) {
      for (const int role : {TinyModel::kGate, TinyModel::kUp, TinyModel::kDown}) {
        const int matrix = role == TinyModel::kDown ? 1 : 0;
        append(codes[matrix], format == "mxfp8" ? kModel.mxfp8_codes(0, expert, role)
                                                : kModel.fp4_codes(0, expert, role));
        append(scales[matrix], format == "nvfp4" ? kModel.nvfp4_scales(0, expert, role)
                                                 : kModel.power_scales(0, expert, role));
        if (format == "nvfp4") globals[matrix].push_back(TinyModel::nvfp4_global_scale(role));
      }
    }
  }
  std::vector<std::uint8_t> codes[2];
  std::vector<std::uint8_t> scales[2];
  std::vector<float> globals[2];
};

void expect_codes(const CodedExperts& loaded, const Expected& expected) {
  const CodedWeight* matrices[] = {&loaded.w13, &loaded.w2};
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(bytes_of(matrices[i]->codes), expected.codes[i]) << i;
    EXPECT_EQ(bytes_of(matrices[i]->scales), expected.scales[i]) << i;
    const std::vector<std::uint8_t> globals = bytes_of(matrices[i]->global_scales);
    ASSERT_EQ(globals.size(), expected.globals[i].size() * sizeof(float));
    EXPECT_TRUE(std::equal(globals.begin(), globals.end(),
                           reinterpret_cast<const std::uint8_t*>(expected.globals[i].data())));
  }
}

TEST(CodedCheckpoint, LoadsBlockScaledExpertsAsValuesAndAsCodes) {
  for (const std::string format : kFormats) {
    SCOPED_TRACE(format);
    const TemporaryDirectory directory;
    kModel.write(directory, "Qwen3MoeForCausalLM", kModel.block_scaled(0, format),
                 TinyModel::quantization(format));
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    const LoadedExperts values = checkpoint.load_experts(0, 1, 3);
    expect_equal(values_of(values.w13), kModel.w13(0, 1, 3));
    expect_equal(values_of(values.w2), kModel.w2(0, 1, 3));
    expect_codes(checkpoint.load_coded_experts(0, 1, 3), Expected(format, 1, 3));
    EXPECT_EQ(checkpoint.load_coded_experts(0, 2, 0).num_experts, 0);
  }
}

TEST(CodedCheckpoint, TakesScalesAsE8M0AndInputScalesOfActivations) {
  const TemporaryDirectory powers;
  kModel.write(powers, "Qwen3MoeForCausalLM", kModel.block_scaled(0, "mxfp8", DType::kF8E8M0),
               TinyModel::quantization("mxfp8"));
  expect_codes(Checkpoint::open(powers.path()).load_coded_experts(0, 0, 4),
               Expected("mxfp8", 0, 4));
  const TemporaryDirectory inputs;
  kModel.write(inputs, "Qwen3MoeForCausalLM", kModel.block_scaled(0, "nvfp4", DType::kU8, true),
               TinyModel::quantization("nvfp4"));
  expect_codes(Checkpoint::open(inputs.path()).load_coded_experts(0, 0, 4),
               Expected("nvfp4", 0, 4));
}

TEST(CodedCheckpoint, LoadsTheFusedMxfp4OfGptOssAsCodes) {
  const TemporaryDirectory directory;
  kModel.write(directory, "GptOssForCausalLM", kModel.mxfp4(0), TinyModel::quantization("mxfp4"));
  const CodedExperts loaded = Checkpoint::open(directory.path()).load_coded_experts(0, 1, 2);
  EXPECT_EQ(loaded.format, StoredFormat::kMxfp4);
  expect_codes(loaded, Expected("mxfp4", 1, 2));
}

/// decoded code * scale of MXFP8 bytes.
std::vector<BF16> decoded(const CodedWeight& matrix) {
  std::vector<BF16> values;
  const std::vector<std::uint8_t> codes = bytes_of(matrix.codes);
  const std::vector<std::uint8_t> scales = bytes_of(matrix.scales);
  values.reserve(codes.size());
  for (std::size_t i = 0; i < codes.size(); ++i) {
    values.push_back(
        to_bf16(std::ldexp(to_float(E4M3{codes[i]}), static_cast<int>(scales[i / 32]) - 127)));
  }
  return values;
}

TEST(CodedCheckpoint, TurnsFp8BlocksIntoMxfp8WhereScalesArePowersOfTwo) {
  const TinyModel model{.num_experts = 2, .d = 160, .f = 192};
  std::vector<OwnedTensor> tensors = model.fp8(0);
  {
    const TemporaryDirectory directory;
    model.write(directory, "DeepseekV3ForCausalLM", tensors);
    const CodedExperts loaded = Checkpoint::open(directory.path()).load_coded_experts(0, 0, 2);
    EXPECT_EQ(loaded.format, StoredFormat::kMxfp8);
    expect_equal(decoded(loaded.w13), model.w13(0, 0, 2));
    expect_equal(decoded(loaded.w2), model.w2(0, 0, 2));
  }
  const std::string name = TinyModel::projection_name(0, 1, TinyModel::kUp) + "_scale_inv";
  for (OwnedTensor& tensor : tensors) {
    const float odd = 0.3f;
    if (tensor.name == name) std::memcpy(tensor.data.data() + 4, &odd, 4);
  }
  const TemporaryDirectory directory;
  model.write(directory, "DeepseekV3ForCausalLM", tensors);
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  EXPECT_EQ(checkpoint.load_coded_experts(0, 0, 1).num_experts, 1) << "expert 0 is sound";
  expect_error(ErrorCode::kUnsupported, {name, "expert 1", "scale [0, 1]", "0.3", "powers of two"},
               [&] { checkpoint.load_coded_experts(0, 0, 2); });
}

TEST(CodedCheckpoint, RefusesToGiveCodesOfBF16) {
  const TemporaryDirectory directory;
  kModel.write(directory, "Qwen3MoeForCausalLM", kModel.per_expert(0, TinyModel::projection_name));
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  expect_error(ErrorCode::kUnsupported, {"expert 2", "BF16", "no codes"},
               [&] { checkpoint.load_coded_experts(0, 2, 1); });
  expect_error(ErrorCode::kInvalidArgument, {"layer 7"},
               [&] { checkpoint.load_coded_experts(7, 0, 1); });
}

// reports: A69
TEST(CodedCheckpoint, RefusesNaNScalesWithTheirPlace) {
  for (const std::string format : kFormats) {
    for (const int byte : {0x7F, 0xFF}) {
      if (format != "nvfp4" && byte == 0x7F) continue;
      SCOPED_TRACE(format);
      std::vector<OwnedTensor> tensors = kModel.block_scaled(0, format);
      const std::string name = TinyModel::projection_name(0, 2, TinyModel::kDown) + "_scale";
      const std::int64_t cols = kModel.f / (format == "nvfp4" ? 16 : 32);
      for (OwnedTensor& tensor : tensors) {
        if (tensor.name != name) continue;
        tensor.data[static_cast<std::size_t>(5 * cols + 1)] = static_cast<std::byte>(byte);
      }
      const TemporaryDirectory directory;
      kModel.write(directory, "Qwen3MoeForCausalLM", tensors, TinyModel::quantization(format));
      const Checkpoint checkpoint = Checkpoint::open(directory.path());
      const std::string value = "byte " + std::to_string(byte);
      const auto refused = [&](auto load) {
        expect_error(ErrorCode::kIo, {name, "expert 2", "scale [5, 1]", value}, load);
      };
      refused([&] { checkpoint.load_experts(0, 0, 4); });
      refused([&] { checkpoint.load_coded_experts(0, 2, 1); });
      EXPECT_EQ(checkpoint.load_experts(0, 3, 1).num_experts, 1) << "expert 3 is sound";
    }
  }
}

TEST(CodedCheckpoint, RefusesGlobalScalesThatAreNoPositiveNumber) {
  for (const float bad : {0.0f, -1.0f, std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<OwnedTensor> tensors = kModel.block_scaled(0, "nvfp4");
    const std::string name = TinyModel::projection_name(0, 3, TinyModel::kUp) + "_scale_2";
    for (OwnedTensor& tensor : tensors) {
      if (tensor.name == name) std::memcpy(tensor.data.data(), &bad, sizeof(bad));
    }
    const TemporaryDirectory directory;
    kModel.write(directory, "Qwen3MoeForCausalLM", tensors, TinyModel::quantization("nvfp4"));
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    expect_error(ErrorCode::kIo, {name, "expert 3", "above 0"},
                 [&] { checkpoint.load_coded_experts(0, 0, 4); });
    expect_error(ErrorCode::kIo, {name, "expert 3", "above 0"},
                 [&] { checkpoint.load_experts(0, 3, 1); });
  }
}

// reports: A73
TEST(CodedCheckpoint, RefusesAMissingScaleOfAnyKind) {
  const std::vector<OwnedTensor> all = kModel.block_scaled(0, "nvfp4", DType::kU8, true);
  for (const char* suffix : {".weight", ".weight_scale", ".weight_scale_2", ".input_scale"}) {
    const std::string name = "model.layers.0.mlp.experts.1.down_proj" + std::string(suffix);
    std::vector<OwnedTensor> tensors;
    for (const OwnedTensor& tensor : all) {
      if (tensor.name != name) tensors.push_back(tensor);
    }
    ASSERT_EQ(tensors.size() + 1, all.size());
    const TemporaryDirectory directory;
    kModel.write(directory, "Qwen3MoeForCausalLM", tensors, TinyModel::quantization("nvfp4"));
    expect_error(ErrorCode::kIo, {"missing (1", name}, [&] { Checkpoint::open(directory.path()); });
  }
}

TEST(CodedCheckpoint, RefusesOtherShapesTypesAndAlgorithms) {
  const auto open = [](const TinyModel& model, const std::vector<OwnedTensor>& tensors,
                       const std::string& quantization) {
    const TemporaryDirectory directory;
    model.write(directory, "Qwen3MoeForCausalLM", tensors, quantization);
    Checkpoint::open(directory.path());
  };
  std::vector<OwnedTensor> tensors = kModel.block_scaled(0, "nvfp4");
  expect_error(ErrorCode::kIo, {"gate_proj.weight", "U8 [64, 48]", "F8_E4M3 [64, 96]"},
               [&] { open(kModel, tensors, TinyModel::quantization("mxfp8")); });
  const TinyModel narrow{.num_experts = 2, .d = 80, .f = 32};
  expect_error(ErrorCode::kUnsupported, {"80 columns", "blocks of 32"}, [&] {
    open(narrow, narrow.block_scaled(0, "nvfp4"), TinyModel::quantization("mxfp8"));
  });
  const std::string head = R"(,"quantization_config":{"quant_method":"modelopt","quant_algo":)";
  expect_error(ErrorCode::kUnsupported, {"FP8", "NVFP4", "MXFP8"},
               [&] { open(kModel, tensors, head + R"("FP8"})"); });
  expect_error(ErrorCode::kUnsupported, {"group_size", "32", "blocks of 16"},
               [&] { open(kModel, tensors, head + R"("NVFP4","group_size":32})"); });
}

}  // namespace
}  // namespace distmoe
