// SPDX-License-Identifier: Apache-2.0
//
// Invariant: every sum is that of a plain loop within the rounding of FP32, whatever is computed
// beside it, and a rounded one is the sum rounded.
#include "backend/cpu/few_row_products.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "conformance/moe_problem.hpp"

namespace distmoe::cpu {
namespace {

std::vector<BF16> random_values(std::int64_t count, std::uint64_t seed) {
  std::vector<BF16> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = to_bf16(conformance::uniform(seed, i));
  }
  return values;
}

class FewRowProducts : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_few_row_products()) GTEST_SKIP() << "this process has no products of few rows";
  }
};

TEST_F(FewRowProducts, ARowOfADgradHasTheSameBitsAmongAnyNumberOfRows) {
  constexpr std::int64_t kColumns = 249;
  constexpr std::int64_t kHalfDepth = 75;
  const std::vector<BF16> rows = random_values(kFewRows * 2 * kHalfDepth, 1);
  const std::vector<BF16> first = random_values(kHalfDepth * kColumns, 2);
  const std::vector<BF16> second = random_values(kHalfDepth * kColumns, 3);
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
  Config config;
  config.hidden_dim = config.intermediate_dim = kN;
  const CpuWorkspaceLayout layout(config);
  std::vector<std::byte> bytes(static_cast<std::size_t>(layout.bytes));
  const Workspace workspace(bytes.data(), layout);
  for (std::int64_t num_rows = 1; num_rows <= kFewRows; ++num_rows) {
    std::vector<BF16> a = random_values(num_rows * (kM + 2), 4);
    std::vector<BF16> b = random_values(num_rows * (kN + 1), 5);
    a[1] = to_bf16(std::numeric_limits<float>::infinity());
    a[2] = to_bf16(std::nanf(""));
    const FewRowsWgrad product({a.data(), kM, kM + 2}, {b.data(), kN, kN + 1}, num_rows, workspace);
    std::vector<float> sums(static_cast<std::size_t>(FewRowsWgrad::kStripRows * product.width()));
    std::vector<BF16> rounded(sums.size());
    for (std::int64_t first = 0; first < kM; first += FewRowsWgrad::kStripRows) {
      product.multiply(first, sums.data());
      product.multiply(first, rounded.data());
      for (std::size_t i = 0; i < sums.size(); ++i) {
        ASSERT_EQ(rounded[i].bits, to_bf16(sums[i]).bits) << sums[i];
      }
      for (std::int64_t m = first; m < std::min(first + FewRowsWgrad::kStripRows, kM); ++m) {
        for (std::int64_t n = 0; n < kN; ++n) {
          double sum = 0;
          double magnitude = 0;
          for (std::int64_t row = 0; row < num_rows; ++row) {
            const double term = double{to_float(a[static_cast<std::size_t>(row * (kM + 2) + m)])} *
                                to_float(b[static_cast<std::size_t>(row * (kN + 1) + n)]);
            sum += term;
            magnitude += std::abs(term);
          }
          const float actual = sums[static_cast<std::size_t>((m - first) * product.width() + n)];
          if (std::isfinite(sum)) {
            ASSERT_NEAR(actual, sum, magnitude * 0x1p-20) << m << ", " << n;
          } else if (std::isnan(sum)) {
            ASSERT_TRUE(std::isnan(actual));
          } else {
            ASSERT_EQ(actual, sum);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace distmoe::cpu
