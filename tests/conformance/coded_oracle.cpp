// SPDX-License-Identifier: Apache-2.0
#include "conformance/coded_oracle.hpp"

#include <cmath>

#include "conformance/coded_values.hpp"

namespace distmoe::conformance {
namespace {

using Matrix = std::vector<double>;

double rounded(double value) { return to_float(to_bf16(value)); }

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

/// [expert] of a tensor [E, rows, columns].
Matrix expert_matrix(const std::vector<BF16>& tensor, std::int64_t expert, MatrixShape shape) {
  const std::int64_t size = shape.rows * shape.columns;
  Matrix matrix;
  for (std::int64_t i = 0; i < size; ++i) {
    matrix.push_back(to_float(tensor[index(expert * size + i)]));
  }
  return matrix;
}

/// a [m, k] times b [n, k]^T.
Matrix product(const Matrix& a, const Matrix& b, std::int64_t depth) {
  const auto k = index(depth);
  const std::size_t m = a.size() / k;
  const std::size_t n = b.size() / k;
  Matrix out(m * n);
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t j = 0; j < n; ++j) {
      for (std::size_t l = 0; l < k; ++l) out[i * n + j] += a[i * k + l] * b[j * k + l];
    }
  }
  return out;
}

Matrix transposed(const Matrix& a, std::int64_t columns) {
  const auto width = index(columns);
  Matrix out(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    out[i % width * (a.size() / width) + i / width] = a[i];
  }
  return out;
}

/// SwiGLU and its derivatives, plain or clamped.
struct Activated {
  double h2, by_gate, by_up;
};
Activated activated(const MoeProblem& problem, double g, double u) {
  const bool is_clamped = problem.activation == Activation::kSwiGLUClamped;
  const double slope = is_clamped ? problem.alpha : 1.0;
  const bool is_gate_cut = is_clamped && g > problem.limit;
  const bool is_up_cut = is_clamped && std::abs(u) > problem.limit;
  if (is_gate_cut) g = problem.limit;
  if (is_up_cut) u = std::copysign(problem.limit, u);
  const double s = 1.0 / (1.0 + std::exp(-slope * g));
  const double factor = is_clamped ? u + 1.0 : u;
  return {.h2 = g * s * factor,
          .by_gate = is_gate_cut ? 0.0 : factor * (s + slope * g * s * (1.0 - s)),
          .by_up = is_up_cut ? 0.0 : g * s};
}

/// One expert with the rows that are routed to it, by token and k.
class ExpertPass {
 public:
  ExpertPass(const MoeProblem& problem, Precision precision, bool is_training, std::int64_t expert,
             const OracleNorm& norm)
      : problem_(problem), precision_(precision), expert_(expert), norm_(norm) {
    const std::int64_t d = problem.shape.hidden_dim;
    const std::int64_t f = problem.shape.intermediate_dim;
    Matrix w13 = expert_matrix(problem.gate, expert, {f, d});
    const Matrix up = expert_matrix(problem.up, expert, {f, d});
    w13.insert(w13.end(), up.begin(), up.end());
    w13_ = coded_weight(w13, {2 * f, d}, is_training);
    w2_ = coded_weight(expert_matrix(problem.down, expert, {d, f}), {d, f}, is_training);
    for (std::int64_t route = 0; route < problem.num_routes(); ++route) {
      if (problem.ids[index(route)] == expert) routes.push_back(route);
    }
  }

  void forward() {
    const std::int64_t d = problem_.shape.hidden_dim;
    const std::int64_t f = problem_.shape.intermediate_dim;
    for (const std::int64_t route : routes) {
      for (std::int64_t i = 0; i < d; ++i) {
        x_.push_back(to_float(problem_.x[index(route / problem_.shape.top_k * d + i)]));
      }
    }
    h1_ = product(coded_rows(x_, d), w13_, d);
    const auto rows = std::ssize(routes);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < 2 * f; ++i) {
        const std::vector<float>& bias = i < f ? problem_.gate_bias : problem_.up_bias;
        double& value = h1_[index(row * 2 * f + i)];
        value = rounded(value + (bias.empty() ? 0.0 : bias[index(expert_ * f + i % f)]));
      }
      for (std::int64_t i = 0; i < f; ++i) {
        h2_.push_back(rounded(
            activated(problem_, h1_[index(row * 2 * f + i)], h1_[index(row * 2 * f + f + i)]).h2));
      }
    }
    result = product(coded_rows(h2_, f), w2_, f);
    for (std::int64_t i = 0; i < rows * d; ++i) {
      const double bias =
          problem_.down_bias.empty() ? 0.0 : problem_.down_bias[index(expert_ * d + i % d)];
      result[index(i)] = rounded(result[index(i)] + bias);
    }
    normalise(rows, d);
  }

  /// Adds to the weights' gradients of `sums`; grad_x [rows, D] stays here.
  void backward(const std::vector<BF16>& dy, GradientOracle& sums) {
    const std::int64_t d = problem_.shape.hidden_dim;
    const std::int64_t f = problem_.shape.intermediate_dim;
    const auto rows = std::ssize(routes);
    Matrix grad_h3;
    for (const std::int64_t route : routes) {
      for (std::int64_t i = 0; i < d; ++i) {
        const double upstream = to_float(dy[index(route / problem_.shape.top_k * d + i)]);
        grad_h3.push_back(upstream * problem_.scores[index(route)]);
      }
    }
    denormalise(grad_h3, d);
    for (std::int64_t i = 0; i < rows * d; ++i) {
      grad_h3[index(i)] = rounded(grad_h3[index(i)]);
      sums.down_bias[index(expert_ * d + i % d)] += grad_h3[index(i)];
    }
    const Matrix grad_h2 = product(coded_rows(grad_h3, d), transposed(w2_, f), d);
    Matrix grad_h1(index(rows * 2 * f));
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < f; ++i) {
        const std::size_t gate = index(row * 2 * f + i);
        const std::size_t up = index(row * 2 * f + f + i);
        const double grad = rounded(grad_h2[index(row * f + i)]);
        const Activated at = activated(problem_, h1_[gate], h1_[up]);
        grad_h1[gate] = rounded(grad * at.by_gate);
        grad_h1[up] = rounded(grad * at.by_up);
        sums.gate_bias[index(expert_ * f + i)] += grad_h1[gate];
        sums.up_bias[index(expert_ * f + i)] += grad_h1[up];
      }
    }
    grad_x = product(coded_rows(grad_h1, 2 * f), transposed(w13_, d), 2 * f);
    for (double& value : grad_x) value = rounded(value);
    if (rows == 0) return;
    const Matrix w2 = product(transposed(coded_columns(grad_h3, d), d),
                              transposed(coded_columns(h2_, f), f), rows);
    const Matrix w13 = product(transposed(coded_columns(grad_h1, 2 * f), 2 * f),
                               transposed(coded_columns(x_, d), d), rows);
    for (std::int64_t i = 0; i < d * f; ++i) {
      sums.down[index(expert_ * d * f + i)] = w2[index(i)];
      sums.gate[index(expert_ * d * f + i)] = w13[index(i)];
      sums.up[index(expert_ * d * f + i)] = w13[index(d * f + i)];
    }
  }

  std::vector<std::int64_t> routes;
  Matrix result;  ///< what the scores multiply: h3, or its rows normalised
  Matrix grad_x;

 private:
  void normalise(std::int64_t rows, std::int64_t d) {
    if (norm_.eps == 0.0) return;
    for (std::int64_t row = 0; row < rows; ++row) {
      double squares = 0.0;
      for (std::int64_t i = 0; i < d; ++i) squares += std::pow(result[index(row * d + i)], 2);
      rstd_.push_back(1.0 / std::sqrt(squares / static_cast<double>(d) + norm_.eps));
      for (std::int64_t i = 0; i < d; ++i) {
        const double gain = norm_.gain.empty() ? 1.0 : norm_.gain[index(i)];
        result[index(row * d + i)] *= rstd_.back() * gain;
      }
    }
  }
  /// Of gradients of the normalised rows makes those of h3: what lies along a row changes nothing.
  void denormalise(Matrix& gradients, std::int64_t d) const {
    for (std::size_t row = 0; row < rstd_.size(); ++row) {
      const auto first = row * index(d);
      double along = 0.0;
      for (std::size_t i = first; i < first + index(d); ++i) along += result[i] * gradients[i];
      for (std::size_t i = first; i < first + index(d); ++i) {
        gradients[i] = (gradients[i] - result[i] * along / static_cast<double>(d)) * rstd_[row];
      }
    }
  }
  Matrix coded_weight(const Matrix& weight, MatrixShape shape, bool is_training) const {
    switch (precision_) {
      case Precision::kMXFP8: return mxfp8_values(weight, shape, is_training ? 32 : 1, 32).values;
      case Precision::kNVFP4: return nvfp4_values(weight, shape, true).values;
      case Precision::kMXFP4: return mxfp4_values(weight, shape).values;
      case Precision::kBF16: break;
    }
    return weight;
  }
  Matrix coded_rows(const Matrix& matrix, std::int64_t columns) const {
    const MatrixShape shape{std::ssize(matrix) / columns, columns};
    if (precision_ == Precision::kMXFP8) return mxfp8_values(matrix, shape, 1, 32).values;
    if (precision_ == Precision::kNVFP4) return nvfp4_values(matrix, shape, false).values;
    return matrix;
  }
  static Matrix coded_columns(const Matrix& matrix, std::int64_t columns) {
    return mxfp8_values(matrix, {std::ssize(matrix) / columns, columns}, 32, 1).values;
  }

  const MoeProblem& problem_;
  Precision precision_;
  std::int64_t expert_;
  const OracleNorm& norm_;
  Matrix w13_, w2_, x_, h1_, h2_;
  std::vector<double> rstd_;  ///< of every row, where there is a norm
};

/// Rows of every route, [T * K, width].
void collect(const Matrix& rows, const std::vector<std::int64_t>& routes, std::int64_t width,
             Matrix& all) {
  for (std::size_t row = 0; row < routes.size(); ++row) {
    for (std::int64_t i = 0; i < width; ++i) {
      all[index(routes[row] * width + i)] = rows[row * index(width) + index(i)];
    }
  }
}

/// Sums of every token's routes, weighted where there are weights.
Matrix sum_routes(const MoeProblem& problem, const Matrix& rows, bool is_weighted) {
  const std::int64_t d = problem.shape.hidden_dim;
  Matrix sums(index(problem.shape.num_tokens * d));
  for (std::int64_t route = 0; route < problem.num_routes(); ++route) {
    if (problem.ids[index(route)] < 0) continue;
    const double weight = is_weighted ? problem.scores[index(route)] : 1.0;
    for (std::int64_t i = 0; i < d; ++i) {
      sums[index(route / problem.shape.top_k * d + i)] += weight * rows[index(route * d + i)];
    }
  }
  for (double& value : sums) value = rounded(value);
  return sums;
}

void scale(BF16& value, int exponent) {
  value = to_bf16(static_cast<float>(std::ldexp(to_float(value), exponent)));
}

/// In [-most, most], by the index.
int exponent_of(std::int64_t i, std::uint64_t seed, int most) {
  return static_cast<int>(mix(seed, static_cast<std::uint64_t>(i)) %
                          static_cast<std::uint64_t>(2 * most + 1)) -
         most;
}

constexpr int kFeatureSpread = 9;
constexpr int kInnerSpread = 9;
constexpr int kTokenSpread = 4;

}  // namespace

void spread_magnitudes(MoeProblem& problem) {
  const MoeShape& shape = problem.shape;
  const std::int64_t d = shape.hidden_dim;
  const std::int64_t f = shape.intermediate_dim;
  for (std::int64_t i = 0; i < std::ssize(problem.x); ++i) {
    scale(problem.x[index(i)],
          exponent_of(i % d, 1, kFeatureSpread) + exponent_of(i / d, 2, kTokenSpread));
  }
  for (std::int64_t i = 0; i < std::ssize(problem.gate); ++i) {
    const int feature = exponent_of(i % d, 1, kFeatureSpread);
    scale(problem.gate[index(i)], -feature);
    scale(problem.up[index(i)], exponent_of(i / d % f, 3, kInnerSpread) - feature);
    scale(problem.down[index(i)], -exponent_of(i % f, 3, kInnerSpread));
  }
}

std::vector<BF16> make_spread_dy(const MoeProblem& problem, std::uint64_t seed) {
  std::vector<BF16> dy = make_dy(problem, seed);
  for (std::int64_t i = 0; i < std::ssize(dy); ++i) {
    scale(dy[index(i)], -2 * exponent_of(i / problem.shape.hidden_dim, 2, kTokenSpread));
  }
  return dy;
}

std::vector<double> coded_forward(const MoeProblem& problem, Precision precision,
                                  const OracleNorm& norm) {
  const std::int64_t d = problem.shape.hidden_dim;
  Matrix results(index(problem.num_routes() * d));
  for (std::int64_t expert = 0; expert < problem.shape.num_experts; ++expert) {
    ExpertPass pass(problem, precision, false, expert, norm);
    pass.forward();
    collect(pass.result, pass.routes, d, results);
  }
  return sum_routes(problem, results, true);
}

GradientOracle coded_gradients(const MoeProblem& problem, const std::vector<BF16>& dy,
                               const OracleNorm& norm) {
  const MoeShape& shape = problem.shape;
  const std::int64_t d = shape.hidden_dim;
  const std::int64_t weights = shape.num_experts * shape.intermediate_dim * d;
  GradientOracle sums{.y = {},
                      .x = {},
                      .scores = Matrix(index(problem.num_routes())),
                      .gate = Matrix(index(weights)),
                      .up = Matrix(index(weights)),
                      .down = Matrix(index(weights)),
                      .gate_bias = Matrix(index(shape.num_experts * shape.intermediate_dim)),
                      .up_bias = Matrix(index(shape.num_experts * shape.intermediate_dim)),
                      .down_bias = Matrix(index(shape.num_experts * d))};
  Matrix results(index(problem.num_routes() * d));
  Matrix grad_x(results.size());
  for (std::int64_t expert = 0; expert < shape.num_experts; ++expert) {
    ExpertPass pass(problem, Precision::kMXFP8, true, expert, norm);
    pass.forward();
    pass.backward(dy, sums);
    collect(pass.result, pass.routes, d, results);
    collect(pass.grad_x, pass.routes, d, grad_x);
  }
  for (std::int64_t route = 0; route < problem.num_routes(); ++route) {
    if (problem.ids[index(route)] < 0) continue;
    for (std::int64_t i = 0; i < d; ++i) {
      sums.scores[index(route)] +=
          results[index(route * d + i)] * to_float(dy[index(route / shape.top_k * d + i)]);
    }
  }
  sums.y = sum_routes(problem, results, true);
  sums.x = sum_routes(problem, grad_x, false);
  return sums;
}

}  // namespace distmoe::conformance
