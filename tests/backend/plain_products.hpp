// SPDX-License-Identifier: Apache-2.0
//
// Operands of a backward's products, and the plain loop that their sums are compared with.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "backend/cpu/grad_matmul.hpp"
#include "conformance/moe_problem.hpp"

namespace distmoe::cpu {

/// Rows `stride` apart, with NaN between them.
inline std::vector<BF16> random_rows(std::int64_t count, std::int64_t width, std::int64_t stride,
                                     std::uint64_t seed) {
  std::vector<BF16> rows(static_cast<std::size_t>(count * stride), BF16{0x7FC0});
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t j = 0; j < width; ++j) {
      rows[static_cast<std::size_t>(i * stride + j)] =
          to_bf16(conformance::uniform(seed, static_cast<std::uint64_t>(i * width + j)));
    }
  }
  return rows;
}

/// Workspace of a context of such widths.
class OwnWorkspace {
 public:
  explicit OwnWorkspace(std::int64_t width)
      : layout_(config_of(width)), bytes_(static_cast<std::size_t>(layout_.bytes) + 128) {}
  Workspace parts() {
    void* base = bytes_.data();
    std::size_t space = bytes_.size();
    std::align(128, static_cast<std::size_t>(layout_.bytes), base, space);
    return {static_cast<std::byte*>(base), layout_};
  }

 private:
  static Config config_of(std::int64_t width) {
    Config config;
    config.hidden_dim = config.intermediate_dim = width;
    return config;
  }
  CpuWorkspaceLayout layout_;
  std::vector<std::byte> bytes_;
};

/// Whether `actual` is sum over k < depth of a(k) * b(k), within the rounding of FP32 sums.
template <typename A, typename B>
testing::AssertionResult is_sum(float actual, std::int64_t depth, const A& a, const B& b) {
  double sum = 0;
  double magnitude = 0;
  for (std::int64_t k = 0; k < depth; ++k) {
    const double term = double{to_float(a(k))} * to_float(b(k));
    sum += term;
    magnitude += std::abs(term);
  }
  const bool is_right = std::isnan(sum)   ? std::isnan(actual)
                        : std::isinf(sum) ? actual == sum
                                          : std::abs(actual - sum) <= magnitude * 0x1p-20;
  if (is_right) return testing::AssertionSuccess();
  return testing::AssertionFailure() << actual << " for a sum of " << sum;
}

}  // namespace distmoe::cpu
