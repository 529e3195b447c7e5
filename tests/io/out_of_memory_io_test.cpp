// SPDX-License-Identifier: Apache-2.0
//
// Invariant: wherever the system gives no memory while experts or an input are read, the error is
// Error(out_of_memory), no other exception and no word of a damaged file.
#include <gtest/gtest.h>

#include <string>

#include "core/failing_allocations.hpp"
#include "io/checkpoint.hpp"
#include "io/routed_input.hpp"
#include "io/tiny_model.hpp"

namespace distmoe {
namespace {

using testing::Act;
using testing::expect_errors;
using testing::TemporaryDirectory;
using testing::TinyModel;

const TinyModel kModel{.num_experts = 2, .d = 64, .f = 32};

// NOTE: not of opening: the JSON library makes values of config.json in functions that are
// noexcept.
TEST(OutOfMemoryIo, OfExperts) {
  for (const std::string format : {"mxfp8", "mxfp4", "nvfp4"}) {
    const TemporaryDirectory directory;
    kModel.write(directory, "Qwen3MoeForCausalLM", kModel.block_scaled(0, format),
                 TinyModel::quantization(format));
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    expect_errors("load_experts", [&](const Act& act) {
      act([&] { static_cast<void>(checkpoint.load_experts(0, 0, 2)); });
    });
    expect_errors("load_coded_experts", [&](const Act& act) {
      act([&] { static_cast<void>(checkpoint.load_coded_experts(0, 0, 2)); });
    });
  }
  const TemporaryDirectory directory;
  kModel.write(directory, "DeepseekV3ForCausalLM", kModel.fp8(0));
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  expect_errors("FP8 tiles", [&](const Act& act) {
    act([&] { static_cast<void>(checkpoint.load_coded_experts(0, 0, 2, BlockShape::kTiles)); });
  });
}

TEST(OutOfMemoryIo, OfInputs) {
  const TemporaryDirectory directory;
  const std::filesystem::path file = directory.path() / "input.safetensors";
  testing::write_tensors(
      file,
      std::vector{
          testing::make_tensor("x", DType::kBF16, {2, 4}, std::vector<BF16>(8)),
          testing::make_tensor("topk_ids", DType::kI32, {2, 1}, std::vector<std::int32_t>{0, 1}),
          testing::make_tensor("topk_scores", DType::kF32, {2, 1}, std::vector<float>{1, 1})});
  expect_errors("RoutedInputFile::open", [&](const Act& act) {
    act([&] { static_cast<void>(RoutedInputFile::open(file, 0)); });
  });
}

}  // namespace
}  // namespace distmoe
