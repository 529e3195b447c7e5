// SPDX-License-Identifier: Apache-2.0
#include "conformance/gradient_oracle.hpp"

#include <cmath>
#include <span>

#include "conformance/moe_oracle.hpp"

namespace distmoe::conformance {
namespace {

/// One route's pass through its expert, forward and backward.
class RoutePass {
 public:
  RoutePass(const MoeProblem& problem, Rounding rounding, bool is_lean, const OracleNorm& norm,
            std::int64_t expert)
      : problem_(problem),
        norm_(norm),
        rounds_(rounding == Rounding::kContract),
        is_lean_(is_lean),
        width_(static_cast<std::size_t>(problem.shape.hidden_dim)),
        inner_(static_cast<std::size_t>(problem.shape.intermediate_dim)),
        expert_(static_cast<std::size_t>(expert)) {}

  void forward(std::span<const BF16> x) {
    g_.assign(inner_, 0);
    u_.assign(inner_, 0);
    h2_.assign(inner_, 0);
    h3.assign(width_, 0);
    for (std::size_t f = 0; f < inner_; ++f) {
      for (std::size_t d = 0; d < width_; ++d) {
        g_[f] += weight(problem_.gate, f, d) * to_float(x[d]);
        u_[f] += weight(problem_.up, f, d) * to_float(x[d]);
      }
      g_[f] = rounded(g_[f] + bias(problem_.gate_bias, inner_, f));
      u_[f] = rounded(u_[f] + bias(problem_.up_bias, inner_, f));
      h2_[f] = rounded(gate_factor(g_[f]) * up_factor(u_[f]));
    }
    for (std::size_t d = 0; d < width_; ++d) {
      for (std::size_t f = 0; f < inner_; ++f) h3[d] += down(d, f) * h2_[f];
      h3[d] = rounded(h3[d] + bias(problem_.down_bias, width_, d));
    }
    normed = h3;
    if (norm_.eps == 0.0) return;
    double squares = 0;
    for (const double value : h3) squares += value * value;
    rstd_ = 1.0 / std::sqrt(squares / static_cast<double>(width_) + norm_.eps);
    for (std::size_t d = 0; d < width_; ++d) {
      normed[d] = h3[d] * rstd_ * (norm_.gain.empty() ? 1.0 : norm_.gain[d]);
    }
  }

  /// Adds this route's part to `sums`; the gradient of x is left in grad_x.
  void backward(std::span<const BF16> x, std::span<const BF16> dy, double score, double& grad_score,
                GradientOracle& sums) {
    std::vector<double> grad_h3(width_);
    double along = 0;  // the part of the gradient along normed, which the norm takes away
    for (std::size_t d = 0; d < width_ && norm_.eps > 0; ++d) {
      along += normed[d] * to_float(dy[d]) * score / static_cast<double>(width_);
    }
    for (std::size_t d = 0; d < width_; ++d) {
      const double scaled = to_float(dy[d]) * score;
      grad_h3[d] = rounded(norm_.eps > 0 ? (scaled - normed[d] * along) * rstd_ : scaled);
      grad_score += to_float(dy[d]) * (is_lean_ ? bias(problem_.down_bias, width_, d) : normed[d]);
      sums.down_bias[expert_ * width_ + d] += grad_h3[d];
    }
    grad_x.assign(width_, 0);
    for (std::size_t f = 0; f < inner_; ++f) {
      double grad_h2 = 0;
      double a = 0;  // of lean: W2^T dy
      for (std::size_t d = 0; d < width_; ++d) {
        grad_h2 += down(d, f) * grad_h3[d];
        a += down(d, f) * to_float(dy[d]);
        sums.down[(expert_ * width_ + d) * inner_ + f] += grad_h3[d] * h2_[f];
      }
      if (is_lean_) {
        grad_score += a * h2_[f];
        grad_h2 = a * score;
      }
      grad_h2 = rounded(grad_h2);
      const double grad_g = rounded(grad_h2 * gate_slope(g_[f]) * up_factor(u_[f]));
      const double grad_u = rounded(grad_h2 * gate_factor(g_[f]) * up_slope(u_[f]));
      sums.gate_bias[expert_ * inner_ + f] += grad_g;
      sums.up_bias[expert_ * inner_ + f] += grad_u;
      for (std::size_t d = 0; d < width_; ++d) {
        const std::size_t at = (expert_ * inner_ + f) * width_ + d;
        sums.gate[at] += grad_g * to_float(x[d]);
        sums.up[at] += grad_u * to_float(x[d]);
        grad_x[d] += grad_g * weight(problem_.gate, f, d) + grad_u * weight(problem_.up, f, d);
      }
    }
    for (double& value : grad_x) value = rounded(value);
  }

  std::vector<double> h3;
  std::vector<double> normed;  ///< what the score multiplies
  std::vector<double> grad_x;

 private:
  double rounded(double value) const { return rounds_ ? to_float(to_bf16(value)) : value; }
  double weight(const std::vector<BF16>& matrix, std::size_t f, std::size_t d) const {
    return to_float(matrix[(expert_ * inner_ + f) * width_ + d]);
  }
  double down(std::size_t d, std::size_t f) const {
    return to_float(problem_.down[(expert_ * width_ + d) * inner_ + f]);
  }
  double bias(const std::vector<float>& biases, std::size_t width, std::size_t i) const {
    return biases.empty() ? 0.0 : biases[expert_ * width + i];
  }

  // h2 = gate_factor(g) * up_factor(u), and the derivatives of both.
  bool is_clamped() const { return problem_.activation == Activation::kSwiGLUClamped; }
  double slope() const { return is_clamped() ? problem_.alpha : 1.0; }
  double sigmoid(double z) const { return 1.0 / (1.0 + std::exp(-z)); }
  double gate_factor(double g) const {
    if (is_clamped() && g > problem_.limit) g = problem_.limit;
    return g * sigmoid(slope() * g);
  }
  double gate_slope(double g) const {
    if (is_clamped() && g > problem_.limit) return 0.0;
    const double s = sigmoid(slope() * g);
    return s + g * slope() * s * (1.0 - s);
  }
  double up_factor(double u) const {
    if (!is_clamped()) return u;
    return std::min(std::max(u, -problem_.limit), problem_.limit) + 1.0;
  }
  double up_slope(double u) const {
    return is_clamped() && std::abs(u) > problem_.limit ? 0.0 : 1.0;
  }

  const MoeProblem& problem_;
  const OracleNorm& norm_;
  double rstd_ = 1.0;
  bool rounds_;
  bool is_lean_;
  std::size_t width_;
  std::size_t inner_;
  std::size_t expert_;
  std::vector<double> g_, u_, h2_;
};

}  // namespace

GradientOracle gradient_oracle(const MoeProblem& problem, const std::vector<BF16>& dy,
                               Rounding rounding, bool is_lean, const OracleNorm& norm) {
  const MoeShape& shape = problem.shape;
  const auto width = static_cast<std::size_t>(shape.hidden_dim);
  const auto ef = static_cast<std::size_t>(shape.num_experts * shape.intermediate_dim);
  const auto ed = static_cast<std::size_t>(shape.num_experts * shape.hidden_dim);
  const auto tokens = static_cast<std::size_t>(shape.num_tokens);
  const auto top_k = static_cast<std::size_t>(shape.top_k);
  GradientOracle sums{.y = std::vector<double>(tokens * width),
                      .x = std::vector<double>(tokens * width),
                      .scores = std::vector<double>(tokens * top_k),
                      .gate = std::vector<double>(ef * width),
                      .up = std::vector<double>(ef * width),
                      .down = std::vector<double>(ef * width),
                      .gate_bias = std::vector<double>(ef),
                      .up_bias = std::vector<double>(ef),
                      .down_bias = std::vector<double>(ed)};
  for (std::size_t token = 0; token < tokens; ++token) {
    const std::span x(problem.x.data() + token * width, width);
    const std::span dy_row(dy.data() + token * width, width);
    for (std::size_t k = 0; k < top_k; ++k) {
      const std::size_t route = token * top_k + k;
      if (problem.ids[route] == -1) continue;
      RoutePass pass(problem, rounding, is_lean, norm, problem.ids[route]);
      pass.forward(x);
      pass.backward(x, dy_row, problem.scores[route], sums.scores[route], sums);
      for (std::size_t d = 0; d < width; ++d) {
        sums.y[token * width + d] += problem.scores[route] * pass.normed[d];
        sums.x[token * width + d] += pass.grad_x[d];
      }
    }
  }
  if (rounding == Rounding::kNone) return sums;
  for (auto* rows : {&sums.y, &sums.x}) {
    for (double& value : *rows) value = to_float(to_bf16(value));
  }
  return sums;
}

double loss_of(const MoeProblem& problem, const std::vector<BF16>& dy) {
  const Oracle forward = oracle_of(problem);
  double loss = 0;
  for (std::size_t i = 0; i < dy.size(); ++i) loss += forward.y[i] * to_float(dy[i]);
  return loss;
}

template <typename Value>
double relative_error(const std::vector<Value>& actual, const std::vector<double>& expected) {
  if (actual.size() != expected.size()) return INFINITY;
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    error += std::pow(static_cast<double>(actual[i]) - expected[i], 2);
    norm += expected[i] * expected[i];
  }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}
template double relative_error(const std::vector<double>&, const std::vector<double>&);
template double relative_error(const std::vector<float>&, const std::vector<double>&);

std::vector<BF16> make_dy(const MoeProblem& problem, std::uint64_t seed) {
  std::vector<BF16> dy;
  const std::int64_t size = problem.shape.num_tokens * problem.shape.hidden_dim;
  dy.reserve(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < size; ++i) {
    dy.push_back(to_bf16(uniform(seed, 4711, static_cast<std::uint64_t>(i))));
  }
  return dy;
}

}  // namespace distmoe::conformance
