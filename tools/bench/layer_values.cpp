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
constexpr std::uint64_t kSeedOfDy = 4;

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

/// sums[i] += factor * noise[first + i].
void add_scaled(const Noise& noise, std::int64_t first, double factor, std::span<double> sums) {
  for_each_piece(first, std::ssize(sums),
                 [&](std::int64_t offset, std::int64_t begin, std::int64_t count) {
                   double* sum = sums.data() + offset;
                   const BF16* n = noise.period().data() + begin;
                   for (std::int64_t i = 0; i < count; ++i) {
                     sum[i] += factor * static_cast<double>(to_float(n[i]));
                   }
                 });
}

double sigmoid(double value) { return 1.0 / (1.0 + std::exp(-value)); }

/// One expert's part of one token.
class ReferenceRoute {
 public:
  ReferenceRoute(const LayerValues& values, std::int64_t expert, std::span<const double> x)
      : values_(values),
        d_(values.hidden_dim),
        f_(values.intermediate_dim),
        w13_(expert * 2 * f_ * d_),
        w2_(expert * d_ * f_) {
    for (std::int64_t i = 0; i < f_; ++i) {
      gate_.push_back(dot(values.w13, w13_ + i * d_, x));
      up_.push_back(dot(values.w13, w13_ + (f_ + i) * d_, x));
      h2_.push_back(gate_.back() * sigmoid(gate_.back()) * up_.back());
    }
  }

  double h3(std::int64_t column) const { return dot(values_.w2, w2_ + column * f_, h2_); }

  /// Adds W13^T of SwiGLU's gradient of W2^T grad_h3.
  void add_grad_x(std::span<const double> grad_h3, std::span<double> grad_x) const {
    std::vector<double> grad_h2(h2_.size());
    for (std::int64_t i = 0; i < d_; ++i) {
      add_scaled(values_.w2, w2_ + i * f_, grad_h3[static_cast<std::size_t>(i)], grad_h2);
    }
    for (std::int64_t i = 0; i < f_; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const double g = gate_[at];
      const double s = sigmoid(g);
      add_scaled(values_.w13, w13_ + i * d_, grad_h2[at] * up_[at] * s * (1 + g * (1 - s)), grad_x);
      add_scaled(values_.w13, w13_ + (f_ + i) * d_, grad_h2[at] * g * s, grad_x);
    }
  }

 private:
  const LayerValues& values_;
  std::int64_t d_;
  std::int64_t f_;
  std::int64_t w13_;  ///< of the expert's first element
  std::int64_t w2_;
  std::vector<double> gate_, up_, h2_;
};

std::vector<double> token_of(const Noise& noise, std::int64_t token, std::int64_t width) {
  std::vector<double> row(static_cast<std::size_t>(width));
  add_scaled(noise, token * width, 1.0, row);
  return row;
}

}  // namespace

LayerValues::LayerValues(const BenchShape& shape)
    : hidden_dim(shape.hidden_dim),
      intermediate_dim(shape.intermediate_dim),
      x(kSeedOfX, 1.0),
      dy(kSeedOfDy, 1.0),
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
  std::vector<double> y = token_of(values.x, token, values.hidden_dim);
  for (double& value : y) value *= weight;
  return y;
}

std::vector<double> reference_row(const LayerValues& values, std::int64_t token,
                                  std::span<const std::int32_t> ids,
                                  std::span<const float> scores) {
  const std::vector<double> x = token_of(values.x, token, values.hidden_dim);
  std::vector<double> y(x.size());
  for (std::size_t k = 0; k < ids.size(); ++k) {
    if (ids[k] < 0) continue;
    const ReferenceRoute route(values, ids[k], x);
    for (std::size_t i = 0; i < y.size(); ++i) {
      y[i] += static_cast<double>(scores[k]) * route.h3(static_cast<std::int64_t>(i));
    }
  }
  return y;
}

TokenReference reference_gradients(const LayerValues& values, std::int64_t token,
                                   std::span<const std::int32_t> ids,
                                   std::span<const float> scores) {
  const std::vector<double> x = token_of(values.x, token, values.hidden_dim);
  const std::vector<double> dy = token_of(values.dy, token, values.hidden_dim);
  TokenReference result{.y = std::vector<double>(x.size()),
                        .grad_x = std::vector<double>(x.size()),
                        .grad_scores = std::vector<double>(ids.size())};
  std::vector<double> grad_h3(x.size());
  for (std::size_t k = 0; k < ids.size(); ++k) {
    if (ids[k] < 0) continue;
    const ReferenceRoute route(values, ids[k], x);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double h3 = route.h3(static_cast<std::int64_t>(i));
      result.y[i] += static_cast<double>(scores[k]) * h3;
      result.grad_scores[k] += dy[i] * h3;
      grad_h3[i] = static_cast<double>(scores[k]) * dy[i];
    }
    route.add_grad_x(grad_h3, result.grad_x);
  }
  return result;
}

}  // namespace distmoe::tools
