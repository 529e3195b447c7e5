// SPDX-License-Identifier: Apache-2.0
//
// Invariant: every sum is that of a plain loop within the rounding of FP32 (of a DGRAD
// grad_matmul_test says so), whatever is computed beside it, and a rounded one is the sum rounded.
#include "backend/cpu/few_row_products.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backend/plain_products.hpp"

namespace distmoe::cpu {
namespace {

class FewRowProducts : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_few_row_products()) GTEST_SKIP() << "this process has no products of few rows";
  }
};

TEST_F(FewRowProducts, ARowOfADgradHasTheSameBitsAmongAnyNumberOfRows) {
  constexpr std::int64_t kColumns = 249;
  constexpr std::int64_t kHalfDepth = 75;
  const std::vector<BF16> rows = random_rows(kFewRows, 2 * kHalfDepth, 2 * kHalfDepth, 1);
  const std::vector<BF16> first = random_rows(kHalfDepth, kColumns, kColumns, 2);
  const std::vector<BF16> second = random_rows(kHalfDepth, kColumns, kColumns, 3);
  const DepthRows weights{.first = first.data(),
                          .second = second.data(),
                          .num_rows = kHalfDepth,
                          .num_columns = kColumns,
                          .row_stride = kColumns};
  std::vector<float> alone(kColumns);
  std::vector<float> tile(kFewRows * kColumns + 1, std::nanf(""));
  for (std::int64_t num_rows = 1; num_rows <= kFewRows; ++num_rows) {
    multiply_few_rows_dgrad({rows.data(), num_rows, 2 * kHalfDepth}, weights, tile.data());
    for (std::int64_t row = 0; row < num_rows; ++row) {
      multiply_few_rows_dgrad({rows.data() + row * 2 * kHalfDepth, 1, 2 * kHalfDepth}, weights,
                              alone.data());
      ASSERT_TRUE(std::equal(alone.begin(), alone.end(), tile.begin() + row * kColumns))
          << "row " << row << " of " << num_rows;
    }
    EXPECT_TRUE(std::isnan(tile[static_cast<std::size_t>(num_rows * kColumns)]));
  }
}

TEST_F(FewRowProducts, WgradsAreThoseOfAPlainLoopAndRoundedAsSums) {
  constexpr std::int64_t kM = 7;
  constexpr std::int64_t kN = 45;
  OwnWorkspace own(kN);
  const Workspace workspace = own.parts();
  for (std::int64_t num_rows = 1; num_rows <= kFewRows; ++num_rows) {
    std::vector<BF16> a = random_rows(num_rows, kM, kM + 2, 4);
    const std::vector<BF16> b = random_rows(num_rows, kN, kN + 1, 5);
    a[1] = to_bf16(std::numeric_limits<float>::infinity());
    a[2] = to_bf16(std::nanf(""));
    const FewRowsWgrad product({a.data(), kM, kM + 2}, {b.data(), kN, kN + 1}, num_rows, workspace);
    std::vector<float> sums(static_cast<std::size_t>(FewRowsWgrad::kStripRows * product.width()),
                            77.0F);
    std::vector<BF16> rounded(sums.size());
    for (std::int64_t first = 0; first < kM; first += FewRowsWgrad::kStripRows) {
      product.multiply(first, sums.data());
      product.multiply(first, rounded.data());
      for (std::size_t i = 0; i < sums.size(); ++i) {
        ASSERT_EQ(rounded[i].bits, to_bf16(sums[i]).bits) << sums[i];
      }
      for (std::int64_t m = first; m < std::min(first + FewRowsWgrad::kStripRows, kM); ++m) {
        for (std::int64_t n = 0; n < kN; ++n) {
          ASSERT_TRUE(is_sum(
              sums[static_cast<std::size_t>((m - first) * product.width() + n)], num_rows,
              [&](std::int64_t k) { return a[static_cast<std::size_t>(k * (kM + 2) + m)]; },
              [&](std::int64_t k) { return b[static_cast<std::size_t>(k * (kN + 1) + n)]; }))
              << m << ", " << n;
        }
      }
    }
  }
}

}  // namespace
}  // namespace distmoe::cpu
