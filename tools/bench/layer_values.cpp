// SPDX-License-Identifier: Apache-2.0
#include "bench/layer_values.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

namespace distmoe::tools {
namespace {

constexpr std::uint64_t kSeedOfX = 1;
constexpr std::uint64_t kSeedOfW13 = 2;
constexpr std::uint64_t kSeedOfW2 = 3;

/// Keeps the variance of what goes in, as trained layers do.
double scale_of(std::int64_t width) { return 1.0 / std::sqrt(static_cast<double>(width)); }

/// sum_i vector[i] * noise[first + i]. Eight sums, so that the loop runs in vector registers.
double dot(const Noise& noise, std::int64_t first, std::span<const double> vector) {
  constexpr std::int64_t kLanes = 8;
  std::array<double, kLanes> sums{};
  for_each_piece(first, std::ssize(vector),
                 [&](std::int64_t offset, std::int64_t begin, std::int64_t count) {
                   const double* v = vector.data() + offset;
                   const BF16* n = noise.period().data() + begin;
                   std::int64_t i = 0;
                   for (; i + kLanes <= count; i += kLanes) {
                     for (std::int64_t lane = 0; lane < kLanes; ++lane) {
                       sums[static_cast<std::size_t>(lane)] +=
                           v[i + lane] * static_cast<double>(to_float(n[i + lane]));
                     }
                   }
                   for (; i < count; ++i) sums[0] += v[i] * static_cast<double>(to_float(n[i]));
                 });
  double sum = 0.0;
  for (const double lane : sums) sum += lane;
  return sum;
}

std::vector<double> token_row(const LayerValues& values, std::int64_t token) {
  std::vector<double> x(static_cast<std::size_t>(values.hidden_dim));
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = to_float(values.x.at(token * values.hidden_dim + static_cast<std::int64_t>(i)));
  }
  return x;
}

double silu(double value) { return value / (1.0 + std::exp(-value)); }

}  // namespace

LayerValues::LayerValues(const BenchShape& shape)
    : hidden_dim(shape.hidden_dim),
      intermediate_dim(shape.intermediate_dim),
      x(kSeedOfX, 1.0),
      w13(kSeedOfW13, scale_of(shape.hidden_dim)),
      w2(kSeedOfW2, scale_of(shape.intermediate_dim)) {}

std::shared_ptr<const LayerValues> SharedLayerValues::of(const BenchShape& shape) {
  const std::scoped_lock lock(mutex_);
  const auto found = std::ranges::find_if(made_, [&](const auto& values) {
    return values->hidden_dim == shape.hidden_dim &&
           values->intermediate_dim == shape.intermediate_dim;
  });
  if (found != made_.end()) return *found;
  return made_.emplace_back(std::make_shared<const LayerValues>(shape));
}

std::vector<double> exchanged_row(const LayerValues& values, std::int64_t token,
                                  std::span<const std::int32_t> ids,
                                  std::span<const float> scores) {
  double weight = 0.0;
  for (std::size_t k = 0; k < ids.size(); ++k) {
    if (ids[k] >= 0) weight += static_cast<double>(scores[k]);
  }
  std::vector<double> y = token_row(values, token);
  for (double& value : y) value *= weight;
  return y;
}

std::vector<double> reference_row(const LayerValues& values, std::int64_t token,
                                  std::span<const std::int32_t> ids,
                                  std::span<const float> scores) {
  const std::int64_t d = values.hidden_dim;
  const std::int64_t f = values.intermediate_dim;
  const std::vector<double> x = token_row(values, token);
  std::vector<double> y(x.size());
  std::vector<double> h2(static_cast<std::size_t>(f));
  for (std::size_t k = 0; k < ids.size(); ++k) {
    if (ids[k] < 0) continue;
    const std::int64_t w13 = ids[k] * 2 * f * d;
    const std::int64_t w2 = ids[k] * d * f;
    for (std::int64_t i = 0; i < f; ++i) {
      const double gate = dot(values.w13, w13 + i * d, x);
      const double up = dot(values.w13, w13 + (f + i) * d, x);
      h2[static_cast<std::size_t>(i)] = silu(gate) * up;
    }
    for (std::int64_t i = 0; i < d; ++i) {
      y[static_cast<std::size_t>(i)] +=
          static_cast<double>(scores[k]) * dot(values.w2, w2 + i * f, h2);
    }
  }
  return y;
}

}  // namespace distmoe::tools
