// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the arithmetic between the products agrees with FP64 to the last BF16 bit but for
// ties, for every gate that BF16 has; NaN, infinities and signed zeros follow the formulas.
#include "backend/cpu/elementwise.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "backend/every_bf16.hpp"

namespace distmoe::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Compares h2 of every gate with `exact`, computed in FP64: the rounded value of a number within a
/// few FP32 steps of it, more where exp has a large argument (its relative error is that of z in
/// FP32).
void expect_every_gate(const std::vector<BF16>& h2, double (*exact)(double g, double u), double u) {
  const std::vector<BF16> gates = every_bf16();
  for (std::size_t i = 0; i < gates.size(); ++i) {
    const double g = to_float(gates[i]);
    const double expected = exact(g, u);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(to_float(h2[i]))) << g;
      continue;
    }
    // exp(-z) overflows FP32 below z = -88.7, where s is 1e-38 and less.
    if (std::abs(expected) < 1e-33) {
      ASSERT_LT(std::abs(to_float(h2[i])), 1e-33) << g;
      continue;
    }
    const double error = 0x1p-21 * (1 + (g < 0 ? -1.702 * g : 0));
    const auto is = [&](double value) { return h2[i].bits == to_bf16(value).bits; };
    ASSERT_TRUE(is(expected) || is(expected * (1 + error)) || is(expected * (1 - error)))
        << "gate " << g << ", up " << u << ": " << to_float(h2[i]) << " for " << expected;
  }
}

TEST(Elementwise, SwigluIsExactForEveryGate) {
  const std::vector<BF16> gates = every_bf16();
  for (const float u : {1.0f, -0.7109375f, 3.0f}) {
    const std::vector<BF16> up(gates.size(), to_bf16(u));
    std::vector<BF16> h2(gates.size(), to_bf16(77.0f));
    swiglu(gates.data(), up.data(), h2.data(), static_cast<std::int64_t>(gates.size()));
    expect_every_gate(
        h2, [](double g, double v) { return g / (1 + std::exp(-g)) * v; }, u);
  }
}

TEST(Elementwise, ClampedSwigluIsExactForEveryGate) {
  const std::vector<BF16> gates = every_bf16();
  for (const float u : {0.0f, 6.5f, 30.0f, -6.5f, -30.0f}) {
    const std::vector<BF16> up(gates.size(), to_bf16(u));
    std::vector<BF16> h2(gates.size(), to_bf16(77.0f));
    swiglu_clamped(gates.data(), up.data(), h2.data(), static_cast<std::int64_t>(gates.size()),
                   1.702f, 7.0f);
    expect_every_gate(
        h2,
        [](double g, double v) {
          constexpr auto kAlpha = static_cast<double>(1.702f);
          const double bounded = g > 7 ? 7.0 : g;
          const double up_bounded = v > 7 ? 7.0 : v < -7 ? -7.0 : v;
          return bounded / (1 + std::exp(-kAlpha * bounded)) * (up_bounded + 1);
        },
        u);
  }
}

TEST(Elementwise, NaNPassesThroughEveryBound) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto& [g, u] : {std::pair{nan, 1.0f}, {1.0f, nan}, {nan, nan}}) {
    const BF16 gate = to_bf16(g);
    const BF16 up = to_bf16(u);
    BF16 h2[2] = {};
    swiglu(&gate, &up, &h2[0], 1);
    swiglu_clamped(&gate, &up, &h2[1], 1, 1.702f, 7.0f);
    EXPECT_TRUE(std::isnan(to_float(h2[0])));
    EXPECT_TRUE(std::isnan(to_float(h2[1])));
  }
}

TEST(Elementwise, InfinitiesAreBoundedByTheClampAlone) {
  const BF16 gate = to_bf16(kInf);
  const BF16 up = to_bf16(-kInf);
  BF16 h2 = {};
  swiglu(&gate, &up, &h2, 1);
  EXPECT_EQ(to_float(h2), -kInf);
  swiglu_clamped(&gate, &up, &h2, 1, 1.702f, 7.0f);
  EXPECT_NEAR(to_float(h2), -42.0, 42.0 / 128);
}

/// Tails of a vector register are neither skipped nor overrun.
TEST(Elementwise, CompensatedSumsOfInfinitiesAreThePlainOnes) {
  const std::vector<BF16> rows{to_bf16(2.0F), to_bf16(-2.0F), to_bf16(kInf), to_bf16(1.0F)};
  const auto n = static_cast<std::int64_t>(rows.size());
  for (const float score : {1.0F, kInf}) {
    std::vector<float> plain(rows.size());
    std::vector<float> kahan(rows.size());
    std::vector<float> compensation(rows.size());
    for (int route = 0; route < 3; ++route) {
      add_normed(rows.data(), score, 0.5F, plain.data(), n);
      add_normed_kahan(rows.data(), score, 0.5F, kahan.data(), compensation.data(), n);
    }
    EXPECT_EQ(plain, kahan);
  }
}

TEST(Elementwise, EveryLengthIsWrittenExactly) {
  for (std::int64_t n = 0; n <= 67; ++n) {
    const auto size = static_cast<std::size_t>(n);
    std::vector<float> acc(size + 4, 2.0f);
    std::vector<float> bias(size + 4, 0.5f);
    std::vector<BF16> out(size + 4, to_bf16(77.0f));
    round_with_bias(acc.data(), bias.data(), out.data(), n);
    add_scaled(out.data(), 4.0f, acc.data(), n);
    std::vector<float> wide(size + 4, 77.0f);
    widen(out.data(), wide.data(), n);
    for (std::size_t i = 0; i < size + 4; ++i) {
      ASSERT_EQ(to_float(out[i]), i < size ? 2.5f : 77.0f) << n;
      ASSERT_EQ(acc[i], i < size ? 12.0f : 2.0f) << n;
      ASSERT_EQ(wide[i], i < size ? 2.5f : 77.0f) << n;
    }
  }
}

}  // namespace
}  // namespace distmoe::cpu
