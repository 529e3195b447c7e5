// SPDX-License-Identifier: Apache-2.0
// Invariant: the distance is that of the two vectors in FP64, however the rows are divided, and an
// element that is NaN or infinite on one side only puts the output outside every tolerance.
#include "comparison.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "distmoe/error.hpp"

namespace distmoe::tools {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

std::uint16_t bf16(float value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

Comparison compare(const std::vector<float>& y, const std::vector<float>& reference) {
  std::vector<std::uint16_t> y_bits;
  y_bits.reserve(y.size());
  for (const float value : y) y_bits.push_back(bf16(value));
  const auto count = static_cast<std::int64_t>(y.size());
  ComparisonSums sums;
  sums.add(TensorView(y_bits.data(), DType::kBF16, {1, count}),
           TensorView(reference.data(), DType::kF32, {1, count}));
  return sums.result();
}

TEST(Comparison, EqualsTheFormulasOnAWorkedExample) {
  // y - ref = (1, 0, -2); |ref|^2 = 1 + 4 + 16 = 21; |y|^2 = 4 + 4 + 4 = 12; y.ref = 2 + 4 + 8
  // = 14.
  const Comparison result = compare({2, -2, 2}, {1, -2, 4});
  EXPECT_DOUBLE_EQ(result.rel_l2, std::sqrt(5.0 / 21.0));
  EXPECT_DOUBLE_EQ(result.cosine, 14.0 / std::sqrt(12.0 * 21.0));
  EXPECT_DOUBLE_EQ(result.max_abs, 2.0);
}

TEST(Comparison, TakesOutputsInFP32) {
  const std::vector<float> y = {1.0001F, -2};
  const std::vector<double> reference = {1, -2};
  ComparisonSums sums;
  sums.add(TensorView(y.data(), DType::kF32, {1, 2}),
           TensorView(reference.data(), DType::kF64, {1, 2}));
  EXPECT_DOUBLE_EQ(sums.result().max_abs, double{1.0001F} - 1);
}

TEST(Comparison, IsExactZeroForEqualVectorsEvenZeroOrEmptyOnes) {
  for (const std::vector<float>& vector : {std::vector<float>{3, -1}, {0, 0}, {}}) {
    const Comparison result = compare(vector, vector);
    EXPECT_EQ(result.rel_l2, 0.0);
    EXPECT_EQ(result.cosine, 1.0);
    EXPECT_EQ(result.max_abs, 0.0);
  }
}

TEST(Comparison, IsInfinitelyFarFromAZeroReference) {
  EXPECT_EQ(compare({1, 0}, {0, 0}).rel_l2, kInfinitelyFar);
}

TEST(Comparison, PutsOneNonFiniteElementOutsideEveryTolerance) {
  for (const float bad : {kNaN, kInf, -kInf}) {
    EXPECT_EQ(compare({1, bad, 3}, {1, 2, 3}).rel_l2, kInfinitelyFar);
    EXPECT_EQ(compare({1, bad, 3}, {1, 2, 3}).max_abs, kInfinitelyFar);
    EXPECT_EQ(compare({1, 2, 3}, {1, bad, 3}).rel_l2, kInfinitelyFar);
    EXPECT_EQ(compare({bad, 2, bad}, {1, bad, bad}).num_one_sided, 2);
  }
}

TEST(Comparison, LeavesOutElementsThatAreNotFiniteOnBothSides) {
  const Comparison result = compare({2, kNaN, kInf}, {1, kNaN, kInf});
  EXPECT_EQ(result.rel_l2, 1.0);
  EXPECT_EQ(result.max_abs, 1.0);
  EXPECT_EQ(result.num_left_out, 2);
  EXPECT_EQ(result.num_one_sided, 0);
}

TEST(Comparison, IsInfinitelyFarWhereNothingIsANumber) {
  const Comparison result = compare({kNaN, kInf}, {kNaN, kNaN});
  EXPECT_EQ(result.rel_l2, kInfinitelyFar);
  EXPECT_EQ(result.cosine, 0.0);
  EXPECT_EQ(result.max_abs, kInfinitelyFar);
  EXPECT_EQ(result.num_left_out, 2);
}

TEST(Comparison, MergedPartsEqualTheWhole) {
  std::vector<std::uint16_t> y;
  std::vector<float> reference;
  for (int i = 0; i < 60; ++i) {
    y.push_back(bf16(static_cast<float>(i * i % 17) - 8.0f));
    reference.push_back(static_cast<float>(i * i % 17) - 8.25f);
  }
  const auto rows = [&](std::int64_t first, std::int64_t count) {
    ComparisonSums sums;
    sums.add(TensorView(y.data() + first * 6, DType::kBF16, {count, 6}),
             TensorView(reference.data() + first * 6, DType::kF32, {count, 6}));
    return sums;
  };
  ComparisonSums merged = rows(0, 3);
  merged.merge(rows(3, 0));
  merged.merge(rows(3, 7));
  const Comparison whole = rows(0, 10).result();
  EXPECT_DOUBLE_EQ(merged.result().rel_l2, whole.rel_l2);
  EXPECT_DOUBLE_EQ(merged.result().cosine, whole.cosine);
  EXPECT_EQ(merged.result().max_abs, 0.25);
  EXPECT_GT(whole.rel_l2, 0.0);
}

TEST(Comparison, RefusesAnotherShapeWithBothShapes) {
  const std::vector<float> reference(6, 0.0f);
  const std::vector<std::uint16_t> y(6, 0);
  ComparisonSums sums;
  try {
    sums.add(TensorView(y.data(), DType::kBF16, {2, 3}),
             TensorView(reference.data(), DType::kF32, {3, 2}));
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("[3, 2]"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("[2, 3]"), std::string::npos);
  }
}

}  // namespace
}  // namespace distmoe::tools
