// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a product is the FP64 sum within the error of FP32 summation, for every number of
// rows, columns and depth around the blocks; its bits depend on the operands alone; nothing behind
// the tile is written. Runs with the BF16 and with the FP32 products.
#include "backend/cpu/matmul.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "conformance/moe_problem.hpp"

namespace distmoe::cpu {
namespace {

/// Operands with gaps of NaN between the rows, a workspace and a tile with a guard.
struct Product {
  std::int64_t num_rows, num_columns, depth, stride;
  std::vector<BF16> rows, weights;
  std::vector<std::byte> workspace;
  std::vector<float> tile;
  CpuWorkspaceLayout layout;

  static Config config_of(std::int64_t depth) {
    Config config;
    config.hidden_dim = config.intermediate_dim = depth;
    return config;
  }

  Product(std::int64_t m, std::int64_t n, std::int64_t k)
      : num_rows(m), num_columns(n), depth(k), stride(k + 3), layout(config_of(k)) {
    const auto fill = [&](std::int64_t count, std::uint64_t seed) {
      std::vector<BF16> values(static_cast<std::size_t>(count * stride), BF16{0x7FC0});
      for (std::int64_t i = 0; i < count; ++i) {
        for (std::int64_t j = 0; j < depth; ++j) {
          const auto at = static_cast<std::size_t>(i * stride + j);
          values[at] = to_bf16(conformance::uniform(seed, at));
        }
      }
      return values;
    };
    rows = fill(m, 1);
    weights = fill(n, 2);
    workspace.resize(static_cast<std::size_t>(layout.bytes) + 128);
    tile.assign(static_cast<std::size_t>(m * n) + 8, std::nanf(""));
  }

  Workspace parts() {
    void* base = workspace.data();
    std::size_t space = workspace.size();
    std::align(128, static_cast<std::size_t>(layout.bytes), base, space);
    return {static_cast<std::byte*>(base), layout};
  }
  /// The tile, row-major.
  const std::vector<float>& run() {
    multiply({rows.data(), num_rows, stride}, {weights.data(), num_columns, stride}, depth,
             tile.data(), parts());
    return tile;
  }
  float at(std::int64_t m, std::int64_t n) const {
    return tile[static_cast<std::size_t>(m * num_columns + n)];
  }
};

void expect_exact(Product& product) {
  product.run();
  for (std::int64_t m = 0; m < product.num_rows; ++m) {
    for (std::int64_t n = 0; n < product.num_columns; ++n) {
      double sum = 0;
      double magnitude = 0;
      for (std::int64_t k = 0; k < product.depth; ++k) {
        const double term =
            static_cast<double>(
                to_float(product.rows[static_cast<std::size_t>(m * product.stride + k)])) *
            to_float(product.weights[static_cast<std::size_t>(n * product.stride + k)]);
        sum += term;
        magnitude += std::abs(term);
      }
      const double bound = magnitude * static_cast<double>(product.depth) * 0x1p-24;
      ASSERT_NEAR(product.at(m, n), sum, bound)
          << product.num_rows << " x " << product.num_columns << " x " << product.depth << " at "
          << m << ", " << n;
    }
  }
  for (std::size_t i = product.tile.size() - 8; i < product.tile.size(); ++i) {
    ASSERT_TRUE(std::isnan(product.tile[i])) << "written behind the tile";
  }
}

TEST(Matmul, ProductsAreExactAroundEveryBlock) {
  for (const std::int64_t rows : {1, 2, 15, 16, 17, 33, 127, 128, 129, 512}) {
    for (const std::int64_t columns : {1, 3, 63, 64, 65, 130}) {
      for (const std::int64_t depth : {1, 2, 7, 33, 64}) {
        Product product(rows, columns, depth);
        ASSERT_NO_FATAL_FAILURE(expect_exact(product));
      }
    }
  }
  Product wide(17, 512, 40);
  ASSERT_NO_FATAL_FAILURE(expect_exact(wide));
}

TEST(Matmul, BitsDependOnTheOperandsAlone) {
  for (const std::int64_t rows : {5, 16, 17, 200}) {
    Product first(rows, 96, 72);
    first.run();
    std::vector<std::thread> threads;
    threads.reserve(4);
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        Product again(rows, 96, 72);
        again.run();
        for (std::int64_t m = 0; m < rows; ++m) {
          for (std::int64_t n = 0; n < 96; ++n) ASSERT_EQ(first.at(m, n), again.at(m, n));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

/// A product of rows without gaps, as calls have them, of weights with rows `weight_stride` apart.
std::vector<float> product_of_dense_rows(std::int64_t rows, std::int64_t columns,
                                         std::int64_t depth, std::int64_t weight_stride) {
  Product product(rows, columns, depth);
  const auto repack = [&](std::vector<BF16>& values, std::int64_t count, std::int64_t stride) {
    std::vector<BF16> packed(static_cast<std::size_t>(count * stride), BF16{0x7FC0});
    for (std::int64_t i = 0; i < count; ++i) {
      std::copy_n(values.begin() + i * product.stride, depth, packed.begin() + i * stride);
    }
    values = std::move(packed);
  };
  repack(product.rows, rows, depth);
  repack(product.weights, columns, weight_stride);
  const Workspace parts = product.parts();
  multiply({product.rows.data(), rows, depth}, {product.weights.data(), columns, weight_stride},
           depth, product.tile.data(), parts);
  return product.tile;
}

// reports: A34, A117: the rows of an interleaved gate lie two apart.
TEST(Matmul, BitsDoNotDependOnTheStrideOfTheWeights) {
  for (const std::int64_t rows : {1, 5, 24, 129}) {
    for (const std::int64_t depth : {512, 513, 2048}) {
      const std::vector<float> expected = product_of_dense_rows(rows, 256, depth, depth);
      for (const std::int64_t stride : {2 * depth, depth + 1, depth + 64}) {
        const std::vector<float> actual = product_of_dense_rows(rows, 256, depth, stride);
        const auto count = static_cast<std::size_t>(rows * 256);
        for (std::size_t i = 0; i < count; ++i) {
          ASSERT_EQ(expected[i], actual[i])
              << rows << " rows, depth " << depth << ", stride " << stride << ", element " << i;
        }
      }
    }
  }
}

// reports: A49: which products run is told.
TEST(Matmul, TheChosenProductsAreTold) {
  const std::string text = describe_matmul();
  EXPECT_NE(text.find("oneDNN"), std::string::npos) << text;
  const char* operands = matmul_kind() == MatmulKind::kBF16 ? "BF16 operands" : "FP32 operands";
  EXPECT_NE(text.find(operands), std::string::npos) << text;
}

}  // namespace
}  // namespace distmoe::cpu
