// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a view says exactly what memory it covers: shape, strides, bytes and contiguity are
// right for every shape, and a shape whose size does not fit in 64 bits is refused.
#include "distmoe/tensor.hpp"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <set>
#include <string>
#include <utility>

#include "distmoe/error.hpp"

namespace distmoe {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

template <typename Body>
void expect_invalid(Body body, const std::string& part) {
  try {
    body();
    ADD_FAILURE() << "no error; expected one with \"" << part << '"';
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(DType, NamesAreDistinctAndSizesAreThoseOfTheTypes) {
  constexpr std::pair<DType, std::size_t> kSizes[] = {
      {DType::kBF16, 2},   {DType::kF16, 2},    {DType::kF32, 4},    {DType::kF64, 8},
      {DType::kI16, 2},    {DType::kI32, 4},    {DType::kI64, 8},    {DType::kU8, 1},
      {DType::kU16, 2},    {DType::kU32, 4},    {DType::kU64, 8},    {DType::kBool, 1},
      {DType::kF8E4M3, 1}, {DType::kF8E5M2, 1}, {DType::kF8E8M0, 1},
  };
  std::set<std::string> names;
  for (const auto& [dtype, bytes] : kSizes) {
    EXPECT_EQ(size_of(dtype), bytes) << to_string(dtype);
    EXPECT_TRUE(names.insert(to_string(dtype)).second) << to_string(dtype);
  }
  EXPECT_EQ(names.count("unknown"), 0U);
}

TEST(TensorView, DefaultIsNotGivenAndHoldsNothing) {
  const TensorView view;
  EXPECT_FALSE(view.is_given());
  EXPECT_EQ(view.num_elements(), 0);
  EXPECT_EQ(view.num_bytes(), 0U);
  EXPECT_EQ(view.describe(), "nothing");
}

TEST(TensorView, ContiguousViewHasRowMajorStrides) {
  std::array<float, 24> data{};
  const TensorView view(data.data(), DType::kF32, {2, 3, 4});
  EXPECT_TRUE(view.is_given());
  EXPECT_EQ(view.data, data.data());
  EXPECT_EQ(view.rank, 3);
  EXPECT_EQ(view.shape, (std::array<std::int64_t, 4>{2, 3, 4, 0}));
  EXPECT_EQ(view.strides, (std::array<std::int64_t, 4>{12, 4, 1, 0}));
  EXPECT_EQ(view.num_elements(), 24);
  EXPECT_EQ(view.num_bytes(), 96U);
  EXPECT_TRUE(view.is_contiguous());
  EXPECT_EQ(view.describe(), "f32 [2, 3, 4]");
}

TEST(TensorView, ConstMemoryIsAcceptedAndPointedAtUnchanged) {
  const std::array<std::int32_t, 6> ids{5, 4, 3, 2, 1, 0};
  const TensorView view(ids.data(), DType::kI32, {3, 2});
  EXPECT_EQ(view.data, static_cast<const void*>(ids.data()));
}

// reports: A02, A03: empty tensors come with null data and are still given.
TEST(TensorView, EmptyTensorMayHaveNullDataAndIsGiven) {
  for (const TensorView& view :
       {TensorView(nullptr, DType::kBF16, {0, 256}), TensorView(nullptr, DType::kBF16, {7, 0})}) {
    EXPECT_TRUE(view.is_given());
    EXPECT_EQ(view.num_elements(), 0);
    EXPECT_EQ(view.num_bytes(), 0U);
    EXPECT_TRUE(view.is_contiguous());
  }
}

TEST(TensorView, FourDimensionsAreTheMost) {
  EXPECT_EQ(TensorView(nullptr, DType::kBF16, {1, 2, 3, 4}).rank, 4);
  expect_invalid([] { TensorView(nullptr, DType::kBF16, {1, 2, 3, 4, 5}); }, "5 dimensions");
}

TEST(TensorView, NegativeExtentIsRefusedWithItsDimension) {
  expect_invalid([] { TensorView(nullptr, DType::kBF16, {3, -2}); }, "extent -2 in dimension 1");
}

// reports: A77, A80.
TEST(TensorView, SizesBeyond32BitsAreExact) {
  const TensorView view(nullptr, DType::kBF16, {299594, 8, 7168});
  EXPECT_EQ(view.num_elements(), 17179918336LL);
  EXPECT_EQ(view.num_bytes(), 34359836672ULL);
  EXPECT_EQ(view.strides[0], 57344);
}

TEST(TensorView, SizesBeyond64BitsAreRefused) {
  expect_invalid([] { TensorView(nullptr, DType::kU8, {1LL << 32, 1LL << 32}); }, "64 bits");
  expect_invalid([] { TensorView(nullptr, DType::kF64, {kMax / 4}); }, "64 bits");
  EXPECT_EQ(TensorView(nullptr, DType::kU8, {kMax}).num_elements(), kMax);
}

TEST(TensorView, StridedViewKeepsItsStridesAndDescribesThem) {
  std::array<float, 40> data{};
  const TensorView view = TensorView::strided(data.data(), DType::kF32, {4, 8}, {10, 1});
  EXPECT_EQ(view.strides, (std::array<std::int64_t, 4>{10, 1, 0, 0}));
  EXPECT_FALSE(view.is_contiguous());
  EXPECT_EQ(view.num_elements(), 32);
  EXPECT_EQ(view.describe(), "f32 [4, 8] with strides [10, 1]");
}

TEST(TensorView, StridesOfExtentsZeroAndOneDoNotMatter) {
  EXPECT_TRUE(TensorView::strided(nullptr, DType::kF32, {1, 8}, {999, 1}).is_contiguous());
  EXPECT_TRUE(TensorView::strided(nullptr, DType::kF32, {4, 1, 8}, {8, -3, 1}).is_contiguous());
  EXPECT_TRUE(TensorView::strided(nullptr, DType::kF32, {0, 8}, {1, 77}).is_contiguous());
  EXPECT_FALSE(TensorView::strided(nullptr, DType::kF32, {4, 8}, {1, 4}).is_contiguous());
  EXPECT_FALSE(TensorView::strided(nullptr, DType::kF32, {4, 8}, {0, 1}).is_contiguous());
}

TEST(TensorView, StridedNeedsAsManyStridesAsDimensions) {
  expect_invalid([] { TensorView::strided(nullptr, DType::kF32, {4, 8}, {8}); }, "1 strides");
}

// The members of a view are public: a rank that its arrays don't have is never followed.
TEST(TensorView, ARankBeyondTheArraysIsSaidAndNotFollowed) {
  for (const int rank :
       {-1, 5, 64, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()}) {
    TensorView view(nullptr, DType::kBF16, {3, 4});
    view.rank = rank;
    EXPECT_TRUE(view.is_given()) << "would pass for a bias that is left out";
    EXPECT_FALSE(view.has_legal_rank());
    EXPECT_EQ(view.num_elements(), 0);
    EXPECT_EQ(view.num_bytes(), 0U);
    EXPECT_FALSE(view.is_contiguous());
    EXPECT_EQ(view.describe(), "bf16 of rank " + std::to_string(rank) + ", which is not 0 to 4");
  }
}

TEST(TensorView, AShapeThatNobodyCheckedIsDescribedWithoutOverflow) {
  TensorView view(nullptr, DType::kBF16, {3, 4});
  view.shape = {kMax, kMax, 0, 0};
  EXPECT_EQ(view.num_elements(), kMax);
  EXPECT_EQ(view.describe(), "bf16 [9223372036854775807, 9223372036854775807] with strides [4, 1]");
}

TEST(TensorView, DeviceIsDescribedWhereItIsNotTheCpu) {
  const TensorView view(nullptr, DType::kF8E4M3, {2}, {DeviceType::kCuda, 1});
  EXPECT_EQ(view.describe(), "f8_e4m3 [2] on cuda:1");
  EXPECT_EQ(to_string(Device{}), "cpu");
}

}  // namespace
}  // namespace distmoe
