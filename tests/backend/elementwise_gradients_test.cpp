// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the gradients between the products agree with FP64 to the last BF16 bit but for ties,
// for every gate that BF16 has; NaN passes wherever the formulas have it; sums have the order of
// the contract; no element beside the row is touched.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "backend/cpu/elementwise.hpp"
#include "backend/every_bf16.hpp"

namespace distmoe::cpu {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kAlpha = 1.702f;
constexpr float kLimit = 7.0f;
constexpr float kUntouched = 77.0f;

/// A value in FP64, and how far FP32 may be from it.
struct Exact {
  double value = 0;
  double error = 0;
};

void expect_near(float actual, const Exact& exact, const char* what, double g) {
  if (std::isnan(exact.value)) {
    ASSERT_TRUE(std::isnan(actual)) << what << " of gate " << g;
    return;
  }
  if (std::isinf(exact.value)) {
    ASSERT_EQ(actual, exact.value) << what << " of gate " << g;
    return;
  }
  // exp(-z) overflows FP32 below z = -88.7, where s is 1e-38 and less.
  if (std::abs(exact.value) < 1e-33) {
    ASSERT_LT(std::abs(actual), 1e-33) << what << " of gate " << g;
    return;
  }
  ASSERT_GE(actual, to_float(to_bf16(exact.value - exact.error))) << what << " of gate " << g;
  ASSERT_LE(actual, to_float(to_bf16(exact.value + exact.error))) << what << " of gate " << g;
}

/// Gradients of gate and up in FP64, of a gate, an up and a gradient of h2.
using Formula = std::function<std::array<Exact, 2>(double g, double u, double grad)>;

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

std::array<Exact, 2> plain(double g, double u, double grad) {
  const double s = sigmoid(g);
  // The relative error of exp in FP32 is that of its argument.
  const double step = 0x1p-20 * (1 + std::abs(g));
  return {Exact{grad * u * s * (1 + g * (1 - s)),
                step * std::abs(grad * u) * s * (1 + std::abs(g) * (1 - s))},
          Exact{grad * g * s, step * std::abs(grad * g) * s}};
}

std::array<Exact, 2> clamped(double g, double u, double grad) {
  const double bounded = g > kLimit ? kLimit : g;
  const double up = (u > kLimit ? kLimit : u < -kLimit ? -kLimit : u) + 1;
  // FP32's: below -2e38 it is infinite, and z * s is NaN as in FP32.
  const double z = kAlpha * static_cast<float>(bounded);
  const double s = sigmoid(z);
  const double step = 0x1p-20 * (1 + std::abs(z));
  const double slope = g > kLimit ? 0 : grad * up * (s + z * s * (1 - s));
  const double up_slope = std::abs(u) > kLimit ? 0 : grad * bounded * s;
  return {Exact{slope, step * std::abs(grad * up) * s * (1 + std::abs(z) * (1 - s))},
          Exact{up_slope, step * std::abs(grad * bounded) * s}};
}

/// The gradients of rows, plain or clamped.
void gradients_of(bool is_clamped, const BF16* gate, const BF16* up, const BF16* grad_h2,
                  BF16* grad_gate, BF16* grad_up, std::int64_t n) {
  if (is_clamped) {
    swiglu_clamped_gradient(gate, up, grad_h2, grad_gate, grad_up, n, kAlpha, kLimit);
  } else {
    swiglu_gradient(gate, up, grad_h2, grad_gate, grad_up, n);
  }
}

void expect_every_gate(bool is_clamped, const Formula& exact) {
  const std::vector<BF16> gates = every_bf16();
  for (const float u : {0.0f, -0.7109375f, 6.5f, 30.0f, -30.0f}) {
    for (const float grad : {1.0f, -0.3359375f}) {
      const std::vector<BF16> up(gates.size(), to_bf16(u));
      const std::vector<BF16> grad_h2(gates.size(), to_bf16(grad));
      std::vector<BF16> grad_gate(gates.size(), to_bf16(kUntouched));
      std::vector<BF16> grad_up(gates.size(), to_bf16(kUntouched));
      gradients_of(is_clamped, gates.data(), up.data(), grad_h2.data(), grad_gate.data(),
                   grad_up.data(), static_cast<std::int64_t>(gates.size()));
      for (std::size_t i = 0; i < gates.size(); ++i) {
        const double g = to_float(gates[i]);
        const auto [of_gate, of_up] = exact(g, u, grad);
        expect_near(to_float(grad_gate[i]), of_gate, "the gradient", g);
        expect_near(to_float(grad_up[i]), of_up, "the up's gradient", g);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(ElementwiseGradients, OfSwigluAreExactForEveryGate) { expect_every_gate(false, plain); }
TEST(ElementwiseGradients, OfClampedSwigluAreExactForEveryGate) {
  expect_every_gate(true, clamped);
}

/// A bound cuts where a value is above it, which NaN is not, and cuts NaN of elsewhere, too.
TEST(ElementwiseGradients, NaNPassesWhereTheFormulasHaveIt) {
  struct Case {
    float g, u, grad;
    std::array<bool, 2> plain;    ///< whether the gradients of gate and up are NaN
    std::array<bool, 2> clamped;  ///< the same
  };
  for (const Case& c :
       {Case{kNaN, 1, 1, {true, true}, {true, true}},
        Case{1, kNaN, 1, {true, false}, {true, false}},
        Case{1, 1, kNaN, {true, true}, {true, true}}, Case{kNaN, 8, 1, {true, true}, {true, false}},
        Case{8, kNaN, 1, {true, false}, {false, false}},
        Case{8, 1, kNaN, {true, true}, {false, true}},
        Case{1, -8, kNaN, {true, true}, {true, false}}}) {
    for (const bool is_clamped : {false, true}) {
      const BF16 gate = to_bf16(c.g);
      const BF16 up = to_bf16(c.u);
      const BF16 grad = to_bf16(c.grad);
      std::array<BF16, 2> gradients{};
      gradients_of(is_clamped, &gate, &up, &grad, gradients.data(), &gradients[1], 1);
      for (const std::size_t which : {0U, 1U}) {
        const float value = to_float(gradients[which]);
        const bool is_nan = (is_clamped ? c.clamped : c.plain)[which];
        EXPECT_EQ(std::isnan(value), is_nan)
            << c.g << ", " << c.u << ", " << c.grad << (is_clamped ? ", clamped " : " ") << which;
        // What a bound cut is zero.
        if (!is_nan && std::isnan(c.g + c.grad)) {
          EXPECT_EQ(value, 0.0f);
        }
      }
    }
  }
}

/// A row of distinct values.
std::vector<BF16> row_of(std::size_t size, float step) {
  std::vector<BF16> row;
  row.reserve(size);
  for (std::size_t i = 0; i < size; ++i) {
    row.push_back(to_bf16(step * (static_cast<float>(i % 37) - 11.5f)));
  }
  return row;
}

/// 16 sums over every 16th element, then halved four times.
float sum_of(const std::vector<float>& terms) {
  std::array<float, 16> sums{};
  for (std::size_t i = 0; i < terms.size(); ++i) sums[i % 16] += terms[i];
  for (std::size_t half = 8; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

/// Tails of a vector register are neither skipped nor overrun.
TEST(ElementwiseGradients, EveryLengthIsWrittenExactly) {
  for (std::int64_t n = 0; n <= 67; ++n) {
    const auto size = static_cast<std::size_t>(n);
    const std::vector<BF16> a = row_of(size + 4, 0.0625f);
    const std::vector<BF16> b = row_of(size + 4, -0.03125f);
    std::vector<float> products;
    products.reserve(size);
    for (std::size_t i = 0; i < size; ++i) products.push_back(to_float(a[i]) * to_float(b[i]));
    ASSERT_EQ(dot(a.data(), b.data(), n), sum_of(products)) << n;
    std::vector<float> wide(size + 4);
    widen(a.data(), wide.data(), static_cast<std::int64_t>(wide.size()));
    ASSERT_EQ(dot(wide.data(), b.data(), n), sum_of(products)) << n;

    const auto untouched = [&] { return std::vector<BF16>(size + 4, to_bf16(kUntouched)); };
    std::vector<BF16> grad_gate = untouched();
    std::vector<BF16> grad_up = untouched();
    std::vector<BF16> scaled = untouched();
    std::vector<BF16> scaled_wide = untouched();
    std::vector<BF16> rounded(size + 4, to_bf16(256.0f));
    std::vector<float> sums(size + 4, 1.0f);
    swiglu_gradient(a.data(), b.data(), a.data(), grad_gate.data(), grad_up.data(), n);
    scale(a.data(), 3.0f, scaled.data(), n);
    scale(wide.data(), 3.0f, scaled_wide.data(), n);
    add_rounded(wide.data(), rounded.data(), n);
    add(wide.data(), sums.data(), n);
    for (std::size_t i = 0; i < size + 4; ++i) {
      const bool is_inside = i < size;
      const float value = to_float(a[i]);
      ASSERT_EQ(to_float(grad_gate[i]) != kUntouched, is_inside) << n;
      ASSERT_EQ(to_float(grad_up[i]) != kUntouched, is_inside) << n;
      ASSERT_EQ(to_float(scaled[i]), is_inside ? to_float(to_bf16(3 * value)) : kUntouched) << n;
      ASSERT_EQ(scaled_wide[i].bits, scaled[i].bits) << n;
      ASSERT_EQ(to_float(rounded[i]), is_inside ? to_float(to_bf16(256 + value)) : 256.0f) << n;
      ASSERT_EQ(sums[i], is_inside ? 1 + value : 1.0f) << n;
    }
  }
}

}  // namespace
}  // namespace distmoe::cpu
