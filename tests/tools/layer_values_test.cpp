// SPDX-License-Identifier: Apache-2.0
// Invariant: noise is random, repeats with a prime period only, and the reference of a token is the
// plain formula on the elements that a device is filled with.
#include "bench/layer_values.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <span>
#include <vector>

namespace distmoe::tools {
namespace {

TEST(Noise, HasThePrimePeriodMeanAndScaleThatItPromises) {
  for (std::int64_t divisor = 2; divisor * divisor <= Noise::kPeriod; ++divisor) {
    ASSERT_NE(Noise::kPeriod % divisor, 0) << divisor;
  }
  const Noise noise(1, 0.25);
  ASSERT_EQ(std::ssize(noise.period()), Noise::kPeriod);
  double sum = 0;
  double squares = 0;
  for (const BF16 value : noise.period()) {
    sum += to_float(value);
    squares += static_cast<double>(to_float(value)) * to_float(value);
  }
  EXPECT_NEAR(sum / Noise::kPeriod, 0.0, 1e-3);
  EXPECT_NEAR(std::sqrt(squares / Noise::kPeriod), 0.25, 1e-3);
  EXPECT_EQ(noise.at(Noise::kPeriod + 5).bits, noise.at(5).bits);
  EXPECT_NE(Noise(2, 0.25).at(5).bits, noise.at(5).bits);
}

TEST(Noise, PiecesCoverARangeAcrossThePeriodInOrder) {
  std::vector<std::int64_t> seen;
  std::int64_t covered = 0;
  for_each_piece(Noise::kPeriod - 3, Noise::kPeriod + 5,
                 [&](std::int64_t offset, std::int64_t begin, std::int64_t count) {
                   EXPECT_EQ(offset, covered);
                   covered += count;
                   seen.push_back(begin);
                 });
  EXPECT_EQ(covered, Noise::kPeriod + 5);
  EXPECT_EQ(seen, (std::vector<std::int64_t>{Noise::kPeriod - 3, 0, 0}));
}

TEST(ReferenceRow, IsTheWeightedSumOfSwiGLUExperts) {
  const BenchShape shape{"", 21, 11, 3, 5, false};
  const LayerValues values(shape);
  const std::int64_t d = 21;
  const std::int64_t f = 11;
  const std::int64_t token = 4;
  const std::vector<std::int32_t> ids = {4, -1, 2};
  const std::vector<float> scores = {0.75F, NAN, 0.5F};
  const std::vector<double> y = reference_row(values, token, ids, scores);
  ASSERT_EQ(std::ssize(y), d);
  for (std::int64_t out = 0; out < d; ++out) {
    double expected = 0;
    for (const std::size_t k : {std::size_t{0}, std::size_t{2}}) {
      double h3 = 0;
      for (std::int64_t i = 0; i < f; ++i) {
        double gate = 0;
        double up = 0;
        for (std::int64_t j = 0; j < d; ++j) {
          const double x = to_float(values.x.at(token * d + j));
          gate += x * to_float(values.w13.at(((ids[k] * 2) * f + i) * d + j));
          up += x * to_float(values.w13.at(((ids[k] * 2 + 1) * f + i) * d + j));
        }
        h3 +=
            gate / (1 + std::exp(-gate)) * up * to_float(values.w2.at((ids[k] * d + out) * f + i));
      }
      expected += static_cast<double>(scores[k]) * h3;
    }
    EXPECT_NEAR(y[static_cast<std::size_t>(out)], expected, 1e-12) << out;
    EXPECT_NE(expected, 0.0);
  }
}

/// dy . y of a token whose x is free, by plain loops. D = 6, F = 5.
double loss_of(const LayerValues& values, std::int64_t token, const std::vector<double>& x,
               std::span<const std::int32_t> ids, std::span<const float> scores) {
  constexpr std::int64_t kD = 6;
  constexpr std::int64_t kF = 5;
  double loss = 0;
  for (std::size_t k = 0; k < ids.size(); ++k) {
    for (std::int64_t f = 0; ids[k] >= 0 && f < kF; ++f) {
      double gate = 0;
      double up = 0;
      for (std::int64_t d = 0; d < kD; ++d) {
        const double value = x[static_cast<std::size_t>(d)];
        gate += value * to_float(values.w13.at((ids[k] * 2 * kF + f) * kD + d));
        up += value * to_float(values.w13.at((ids[k] * 2 * kF + kF + f) * kD + d));
      }
      for (std::int64_t d = 0; d < kD; ++d) {
        loss += to_float(values.dy.at(token * kD + d)) * double{scores[k]} *
                to_float(values.w2.at((ids[k] * kD + d) * kF + f)) * gate / (1 + std::exp(-gate)) *
                up;
      }
    }
  }
  return loss;
}

TEST(ReferenceGradients, AreTheSlopesOfTheReference) {
  const LayerValues values({"", 6, 5, 3, 5, false});
  const std::int64_t token = 3;
  const std::vector<std::int32_t> ids = {4, -1, 2};
  const std::vector<float> scores = {0.75F, NAN, 0.5F};
  std::vector<double> x;
  x.reserve(6);
  for (std::int64_t d = 0; d < 6; ++d) x.push_back(to_float(values.x.at(token * 6 + d)));
  const TokenReference reference = reference_gradients(values, token, ids, scores);
  EXPECT_EQ(reference.y, reference_row(values, token, ids, scores));
  ASSERT_EQ(reference.grad_x.size(), x.size());
  for (std::size_t d = 0; d < x.size(); ++d) {
    constexpr double kStep = 1e-5;
    std::vector<double> above = x;
    std::vector<double> below = x;
    above[d] += kStep;
    below[d] -= kStep;
    const double slope =
        (loss_of(values, token, above, ids, scores) - loss_of(values, token, below, ids, scores)) /
        (2 * kStep);
    EXPECT_NEAR(reference.grad_x[d], slope, 1e-8) << d;
  }
  EXPECT_EQ(reference.grad_scores[1], 0.0);
  for (const std::size_t k : {std::size_t{0}, std::size_t{2}}) {
    std::vector<float> more = scores;
    more[k] += 1;  // y is linear in it
    const double slope =
        loss_of(values, token, x, ids, more) - loss_of(values, token, x, ids, scores);
    EXPECT_NEAR(reference.grad_scores[k], slope, 1e-12);
  }
}

TEST(SharedLayerValues, AreMadeOnceAShape) {
  SharedLayerValues shared;
  const auto one = shared.of({"", 8, 4, 1, 2, false});
  EXPECT_EQ(shared.of({"other name", 8, 4, 2, 9, true}), one);
  EXPECT_NE(shared.of({"", 4, 8, 1, 2, false}), one);
}

}  // namespace
}  // namespace distmoe::tools
