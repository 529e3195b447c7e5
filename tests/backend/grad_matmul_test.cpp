// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the products of a backward are those of a plain loop within the rounding of FP32 sums,
// write their tile alone, and have the same bits for every stride of the weights.
#include "backend/cpu/grad_matmul.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "backend/plain_products.hpp"

namespace distmoe::cpu {
namespace {

constexpr std::size_t kSpare = 8;

struct DgradShape {
  std::int64_t m, n, half_depth;
  bool has_second;
};

std::vector<float> dgrad(const DgradShape& shape, std::int64_t gap) {
  const std::int64_t depth = shape.half_depth * (shape.has_second ? 2 : 1);
  const std::int64_t stride = shape.n + gap;
  const std::vector<BF16> rows = random_rows(shape.m, depth, depth, 1);
  const std::vector<BF16> first = random_rows(shape.half_depth, shape.n, stride, 2);
  const std::vector<BF16> second = random_rows(shape.half_depth, shape.n, stride, 3);
  OwnWorkspace workspace(std::max(shape.n, shape.half_depth));
  std::vector<float> tile(static_cast<std::size_t>(shape.m * shape.n) + kSpare, std::nanf(""));
  multiply_dgrad({rows.data(), shape.m, depth},
                 {.first = first.data(),
                  .second = shape.has_second ? second.data() : nullptr,
                  .num_rows = shape.half_depth,
                  .num_columns = shape.n,
                  .row_stride = stride},
                 tile.data(), workspace.parts());
  for (std::int64_t m = 0; m < shape.m; ++m) {
    for (std::int64_t n = 0; n < shape.n; ++n) {
      const auto row_at = [&](std::int64_t k) {
        return rows[static_cast<std::size_t>(m * depth + k)];
      };
      const auto weight_at = [&](std::int64_t k) {
        const std::vector<BF16>& matrix = k < shape.half_depth ? first : second;
        return matrix[static_cast<std::size_t>(k % shape.half_depth * stride + n)];
      };
      EXPECT_TRUE(is_sum(tile[static_cast<std::size_t>(m * shape.n + n)], depth, row_at, weight_at))
          << m << ", " << n;
    }
  }
  for (std::size_t i = 0; i < kSpare; ++i) EXPECT_TRUE(std::isnan(tile[tile.size() - 1 - i]));
  return tile;
}

TEST(Dgrad, IsThatOfAPlainLoopWithTheSameBitsForEveryStrideOfTheWeights) {
  for (const DgradShape& shape :
       {DgradShape{1, 1, 1, true}, DgradShape{2, 3, 5, false}, DgradShape{5, 10, 6, true},
        DgradShape{64, 64, 64, false}, DgradShape{7, 250, 250, true}, DgradShape{33, 47, 101, true},
        DgradShape{130, 256, 96, true}, DgradShape{17, 200, 320, false}}) {
    SCOPED_TRACE(testing::Message() << shape.m << " x " << shape.n << " x " << shape.half_depth);
    const std::vector<float> dense = dgrad(shape, 0);
    const std::vector<float> strided = dgrad(shape, 5);
    const std::size_t bytes = (dense.size() - kSpare) * sizeof(float);
    EXPECT_EQ(std::memcmp(dense.data(), strided.data(), bytes), 0);
  }
}

TEST(Wgrad, IsThatOfAPlainLoop) {
  for (const auto& [m, n, num_rows] : {std::tuple(1, 1, 1), std::tuple(3, 5, 2),
                                       std::tuple(64, 48, 33), std::tuple(200, 130, 300)}) {
    const std::vector<BF16> a = random_rows(num_rows, m, m + 3, 4);
    const std::vector<BF16> b = random_rows(num_rows, n, n + 1, 5);
    OwnWorkspace workspace(std::max(m, n));
    std::vector<float> tile(static_cast<std::size_t>(m * n) + kSpare, std::nanf(""));
    // In one product, and as the sum of two.
    for (const std::int64_t first : {num_rows, num_rows / 2}) {
      if (first == 0) continue;
      multiply_wgrad({a.data(), m, m + 3}, {b.data(), n, n + 1}, first, tile.data(), false,
                     workspace.parts());
      if (first == num_rows) continue;
      multiply_wgrad({a.data() + first * (m + 3), m, m + 3}, {b.data() + first * (n + 1), n, n + 1},
                     num_rows - first, tile.data(), true, workspace.parts());
    }
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        EXPECT_TRUE(is_sum(
            tile[static_cast<std::size_t>(i * n + j)], num_rows,
            [&, i = i](std::int64_t k) { return a[static_cast<std::size_t>(k * (m + 3) + i)]; },
            [&, j = j](std::int64_t k) { return b[static_cast<std::size_t>(k * (n + 1) + j)]; }));
      }
    }
    EXPECT_TRUE(std::isnan(tile.back()));
  }
}

}  // namespace
}  // namespace distmoe::cpu
