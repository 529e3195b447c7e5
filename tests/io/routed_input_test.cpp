// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the captured input of a layer is read as it stands, and tensors that break the
// contract are invalid_argument with name, type and shape.
#include "io/routed_input.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "formats/bf16.hpp"
#include "io/expect_error.hpp"
#include "io/raw_safetensors.hpp"
#include "io/temporary_directory.hpp"
#include "io/tiny_model.hpp"

namespace distmoe {
namespace {

using testing::expect_error;
using testing::make_tensor;
using testing::OwnedTensor;
using testing::TemporaryDirectory;

constexpr std::int64_t kTokens = 3;
constexpr std::int64_t kWidth = 4;
constexpr std::int64_t kTopK = 2;

/// Values differ by `tag`, so that one layer's tensors cannot pass for another's.
std::vector<OwnedTensor> tensors(const std::string& prefix, float tag) {
  std::vector<BF16> x;
  std::vector<float> y;
  for (std::int64_t i = 0; i < kTokens * kWidth; ++i) {
    x.push_back(to_bf16(tag + static_cast<float>(i)));
    y.push_back(-tag - static_cast<float>(i));
  }
  const std::vector<std::int32_t> ids = {4, 1, -1, 2, 3, 0};
  const std::vector<float> scores = {tag, 0.25f, 0.75f, 0.5f, 0.125f, 0.0625f};
  return {make_tensor(prefix + "x", DType::kBF16, {kTokens, kWidth}, x),
          make_tensor(prefix + "topk_ids", DType::kI32, {kTokens, kTopK}, ids),
          make_tensor(prefix + "topk_scores", DType::kF32, {kTokens, kTopK}, scores),
          make_tensor(prefix + "y_ref", DType::kF32, {kTokens, kWidth}, y)};
}

class RoutedInputFileTest : public ::testing::Test {
 protected:
  RoutedInputFile open(const std::vector<OwnedTensor>& list, std::int64_t layer) {
    testing::write_tensors(directory_ / "input", list);
    return RoutedInputFile::open(directory_ / "input", layer);
  }

  void expect_refused(const std::vector<OwnedTensor>& list,
                      std::initializer_list<std::string_view> fragments) {
    expect_error(ErrorCode::kInvalidArgument, fragments, [&] { open(list, 1); });
  }

  TemporaryDirectory directory_;
};

float first_score(const RoutedInputFile& file) {
  return static_cast<const float*>(file.input().topk_scores_TK.data)[0];
}

TEST_F(RoutedInputFileTest, ReadsTheLayerThatWasAskedFor) {
  const auto list = tensors("layer1.", 8) + tensors("layer10.", 16) + tensors("", 32);
  const RoutedInputFile file = open(list, 1);
  EXPECT_EQ(file.num_tokens(), kTokens);
  EXPECT_EQ(file.hidden_dim(), kWidth);
  EXPECT_EQ(file.top_k(), kTopK);
  EXPECT_EQ(file.input().x_TD.describe(), "bf16 [3, 4]");
  EXPECT_EQ(to_float(static_cast<const BF16*>(file.input().x_TD.data)[11]), 19.0f);
  EXPECT_EQ(file.input().topk_ids_TK.describe(), "int32 [3, 2]");
  EXPECT_EQ(static_cast<const std::int32_t*>(file.input().topk_ids_TK.data)[2], -1);
  EXPECT_EQ(first_score(file), 8.0f);
  ASSERT_TRUE(file.y_ref().is_given());
  EXPECT_EQ(static_cast<const float*>(file.y_ref().data)[1], -9.0f);
  EXPECT_EQ(first_score(open(list, 10)), 16.0f);
  EXPECT_EQ(first_score(open(list, 0)), 32.0f) << "without the prefix";
}

TEST_F(RoutedInputFileTest, DoesWithoutAReference) {
  auto list = tensors("", 1);
  list.pop_back();
  EXPECT_FALSE(open(list, 5).y_ref().is_given());
}

// reports: A30, A31
TEST_F(RoutedInputFileTest, AcceptsInt64IdsAndBf16Scores) {
  auto list = tensors("layer1.", 1);
  list[1] = make_tensor("layer1.topk_ids", DType::kI64, {kTokens, kTopK},
                        std::vector<std::int64_t>{0, 1, 2, 3, std::int64_t{1} << 32, 5});
  list[2] = make_tensor("layer1.topk_scores", DType::kBF16, {kTokens, kTopK},
                        std::vector<BF16>(6, to_bf16(0.5f)));
  const RoutedInputFile file = open(list, 1);
  EXPECT_EQ(static_cast<const std::int64_t*>(file.input().topk_ids_TK.data)[4],
            std::int64_t{1} << 32);
  EXPECT_EQ(file.input().topk_scores_TK.dtype, DType::kBF16);
}

TEST_F(RoutedInputFileTest, AcceptsNoTokens) {
  const std::vector<OwnedTensor> list = {
      make_tensor("x", DType::kBF16, {0, 4}, std::vector<BF16>{}),
      make_tensor("topk_ids", DType::kI32, {0, 2}, std::vector<std::int32_t>{}),
      make_tensor("topk_scores", DType::kF32, {0, 2}, std::vector<float>{})};
  EXPECT_EQ(open(list, 0).num_tokens(), 0);
}

TEST_F(RoutedInputFileTest, NamesWhatIsMissing) {
  for (std::size_t i = 0; i < 3; ++i) {
    auto list = tensors("layer1.", 1) + tensors("", 1);
    const std::string name = list[i].name;
    list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
    expect_refused(list, {"'" + name + "'", "/input"});
  }
  expect_refused(tensors("layer2.", 1), {"no tensor 'x'", "layer1."});
}

// reports: A30, A64
TEST_F(RoutedInputFileTest, RefusesOtherTypesByName) {
  const auto with = [&](std::size_t which, DType dtype) {
    auto list = tensors("layer1.", 1);
    list[which].dtype = dtype;
    const auto count = static_cast<std::size_t>(list[which].shape[0] * list[which].shape[1]);
    list[which].data.resize(count * size_of(dtype));
    return list;
  };
  expect_refused(with(0, DType::kF16), {"'layer1.x'", "F16 [3, 4]", "BF16 [T, D]"});
  expect_refused(with(0, DType::kF32), {"'layer1.x'", "F32 [3, 4]", "BF16 [T, D]"});
  expect_refused(with(1, DType::kI16), {"'layer1.topk_ids'", "I16 [3, 2]", "I32 or I64"});
  expect_refused(with(1, DType::kU32), {"'layer1.topk_ids'", "U32 [3, 2]", "I32 or I64"});
  expect_refused(with(1, DType::kF32), {"'layer1.topk_ids'", "F32 [3, 2]", "I32 or I64"});
  expect_refused(with(2, DType::kF16), {"'layer1.topk_scores'", "F16 [3, 2]", "F32 or BF16"});
  expect_refused(with(3, DType::kBF16), {"'layer1.y_ref'", "BF16 [3, 4]", "F32 [T, D]"});
}

TEST_F(RoutedInputFileTest, RefusesShapesThatDoNotFitTogether) {
  const auto with = [&](std::size_t which, std::vector<std::int64_t> shape) {
    auto list = tensors("layer1.", 1);
    std::size_t num_bytes = size_of(list[which].dtype);
    for (const std::int64_t extent : shape) num_bytes *= static_cast<std::size_t>(extent);
    list[which].shape = std::move(shape);
    list[which].data.resize(num_bytes);
    return list;
  };
  expect_refused(with(0, {4, 4}), {"'layer1.topk_ids'", "I32 [3, 2]", "BF16 [4, 4]"});
  expect_refused(with(1, {3, 3}), {"'layer1.topk_scores'", "F32 [3, 2]", "I32 [3, 3]"});
  expect_refused(with(2, {2, 2}), {"'layer1.topk_scores'", "F32 [2, 2]"});
  expect_refused(with(3, {3, 5}), {"'layer1.y_ref'", "F32 [3, 5]", "BF16 [3, 4]"});
  expect_refused(with(0, {12}), {"'layer1.x'", "BF16 [12]"});
  expect_refused(with(2, {3, 1, 2}), {"'layer1.topk_scores'", "F32 [3, 1, 2]"});
}

// reports: A38
TEST_F(RoutedInputFileTest, AlignsTensorsThatLieAtOddAddresses) {
  std::string header = R"({"pad":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                       R"("x":{"dtype":"BF16","shape":[1,1],"data_offsets":[1,3]},)"
                       R"("topk_ids":{"dtype":"I64","shape":[1,1],"data_offsets":[3,11]},)"
                       R"("topk_scores":{"dtype":"F32","shape":[1,1],"data_offsets":[11,15]}})";
  header.append((8 - header.size() % 8) % 8, ' ');
  std::string data(15, '\0');
  const std::int64_t id = 6;
  const float score = 0.375f;
  const BF16 x = to_bf16(2.5f);
  std::memcpy(&data[1], &x, sizeof(x));
  std::memcpy(&data[3], &id, sizeof(id));
  std::memcpy(&data[11], &score, sizeof(score));
  testing::write_file(directory_ / "odd", testing::raw_safetensors(header, data));
  RoutedInputFile opened = RoutedInputFile::open(directory_ / "odd", 0);
  const RoutedInputFile file = std::move(opened);
  for (const TensorView& view :
       {file.input().x_TD, file.input().topk_ids_TK, file.input().topk_scores_TK}) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype), 0u);
  }
  EXPECT_EQ(to_float(*static_cast<const BF16*>(file.input().x_TD.data)), 2.5f);
  EXPECT_EQ(*static_cast<const std::int64_t*>(file.input().topk_ids_TK.data), 6);
  EXPECT_EQ(first_score(file), 0.375f);
}

TEST_F(RoutedInputFileTest, SaysIoWhereTheFileIsTheProblem) {
  expect_error(ErrorCode::kIo, {"/absent"},
               [&] { RoutedInputFile::open(directory_ / "absent", 0); });
  testing::write_file(directory_ / "text", "this is no safetensors file");
  expect_error(ErrorCode::kIo, {"/text"}, [&] { RoutedInputFile::open(directory_ / "text", 0); });
}

}  // namespace
}  // namespace distmoe
