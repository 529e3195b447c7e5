// SPDX-License-Identifier: Apache-2.0
#include "conformance/moe_oracle.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <thread>

#include "plan/expert_partition.hpp"

namespace distmoe::conformance {
namespace {

double identity(double value) { return value; }
float rounded(float value) { return to_float(to_bf16(value)); }

template <typename Real>
Real swish(Real z, Real slope) {
  return z * (Real{1} / (Real{1} + std::exp(-slope * z)));
}

template <typename Real>
Real swiglu_of(const MoeProblem& problem, Real g, Real u) {
  if (problem.activation == Activation::kSwiGLU) return swish(g, Real{1}) * u;
  const auto limit = static_cast<Real>(problem.limit);
  if (g > limit) g = limit;
  if (u > limit) u = limit;
  if (u < -limit) u = -limit;
  return swish(g, static_cast<Real>(problem.alpha)) * (u + Real{1});
}

/// How far one ulp of g and one of u move h2, in ulps of BF16.
template <typename Real>
Real spread_of(const MoeProblem& problem, Real g, Real u) {
  const bool is_clamped = problem.activation == Activation::kSwiGLUClamped;
  const auto slope = static_cast<Real>(is_clamped ? problem.alpha : 1.0);
  const auto offset = static_cast<Real>(is_clamped ? 1.0 : 0.0);
  return std::abs(swish(g, slope)) * (Real{1} + std::abs(g)) * (std::abs(u) + offset);
}

/// One expert's answer to one row of x.
template <typename Real>
struct ExpertRow {
  std::vector<Real> h2;
  std::vector<Real> spread;
  std::vector<Real> h3;
};

template <typename Real, typename Round>
ExpertRow<Real> expert_row(const MoeProblem& problem, std::int64_t expert, const BF16* x,
                           Round round) {
  const std::int64_t width = problem.shape.hidden_dim;
  const std::int64_t inner = problem.shape.intermediate_dim;
  ExpertRow<Real> row;
  for (std::int64_t f = 0; f < inner; ++f) {
    Real g = 0;
    Real u = 0;
    const std::int64_t at = (expert * inner + f) * width;
    for (std::int64_t d = 0; d < width; ++d) {
      const Real value = to_float(x[d]);
      g += Real{to_float(problem.gate[static_cast<std::size_t>(at + d)])} * value;
      u += Real{to_float(problem.up[static_cast<std::size_t>(at + d)])} * value;
    }
    const auto bias_at = static_cast<std::size_t>(expert * inner + f);
    if (!problem.gate_bias.empty()) g += Real{problem.gate_bias[bias_at]};
    if (!problem.up_bias.empty()) u += Real{problem.up_bias[bias_at]};
    row.h2.push_back(round(swiglu_of<Real>(problem, round(g), round(u))));
    row.spread.push_back(spread_of<Real>(problem, g, u));
  }
  for (std::int64_t d = 0; d < width; ++d) {
    Real sum = 0;
    const std::int64_t at = (expert * width + d) * inner;
    for (std::int64_t f = 0; f < inner; ++f) {
      sum += Real{to_float(problem.down[static_cast<std::size_t>(at + f)])} *
             row.h2[static_cast<std::size_t>(f)];
    }
    if (!problem.down_bias.empty()) {
      sum += Real{problem.down_bias[static_cast<std::size_t>(expert * width + d)]};
    }
    row.h3.push_back(round(sum));
  }
  return row;
}

template <typename Real, typename Round, typename Visit>
void visit_token(const MoeProblem& problem, std::int64_t token, Round round, const Visit& visit) {
  const BF16* x = problem.x.data() + token * problem.shape.hidden_dim;
  for (std::int64_t k = 0; k < problem.shape.top_k; ++k) {
    const auto route = static_cast<std::size_t>(token * problem.shape.top_k + k);
    const std::int64_t expert = problem.ids[route];
    if (expert == -1) continue;
    visit(token, Real{problem.scores[route]}, expert, expert_row<Real>(problem, expert, x, round));
  }
}

/// Calls visit(token, score, expert, expert row) for every enabled route; those of one token in the
/// order of k on one thread.
template <typename Real, typename Round, typename Visit>
void for_each_route(const MoeProblem& problem, Round round, const Visit& visit) {
  const MoeShape& shape = problem.shape;
  const std::int64_t products =
      problem.num_routes() * 3 * shape.hidden_dim * shape.intermediate_dim;
  constexpr std::int64_t kProductsWorthAThread = 1 << 22;
  const auto threads =
      std::clamp<std::int64_t>(products / kProductsWorthAThread, 1,
                               std::max<std::int64_t>(1, std::thread::hardware_concurrency()));
  std::vector<std::jthread> others;
  const auto take = [&](std::int64_t first) {
    for (std::int64_t token = first; token < shape.num_tokens; token += threads) {
      visit_token<Real>(problem, token, round, visit);
    }
  };
  for (std::int64_t thread = 1; thread < threads; ++thread) others.emplace_back(take, thread);
  take(0);
}
/// How far independent ulps of h1 and one of h3 move element d of an expert's answer.
double sensitivity(const MoeProblem& problem, std::int64_t expert, const ExpertRow<double>& row,
                   std::int64_t d) {
  const std::int64_t inner = problem.shape.intermediate_dim;
  double squares = 0;
  for (std::int64_t f = 0; f < inner; ++f) {
    const double weight = to_float(
        problem
            .down[static_cast<std::size_t>((expert * problem.shape.hidden_dim + d) * inner + f)]);
    squares += std::pow(weight * row.spread[static_cast<std::size_t>(f)], 2);
  }
  return std::abs(row.h3[static_cast<std::size_t>(d)]) + 2 * std::sqrt(squares);
}

struct Norms {
  double actual = 0;
  double plain = 0;
  double term = 0;
  bool holds() const { return std::sqrt(actual) <= 1.5 * std::sqrt(plain) + 0x1p-8 * term; }
};

}  // namespace

double swiglu_value(const MoeProblem& problem, double g, double u) {
  return swiglu_of<double>(problem, g, u);
}

Oracle oracle_of(const MoeProblem& problem) {
  const std::int64_t width = problem.shape.hidden_dim;
  const auto size = static_cast<std::size_t>(problem.shape.num_tokens * width);
  Oracle oracle{std::vector<double>(size), std::vector<double>(size)};
  for_each_route<double>(
      problem, identity,
      [&](std::int64_t token, double score, std::int64_t expert, const ExpertRow<double>& row) {
        for (std::int64_t d = 0; d < width; ++d) {
          const auto at = static_cast<std::size_t>(token * width + d);
          oracle.y[at] += score * row.h3[static_cast<std::size_t>(d)];
          oracle.magnitude[at] += std::abs(score) * sensitivity(problem, expert, row, d);
        }
      });
  return oracle;
}

std::vector<BF16> plain_of(const MoeProblem& problem, int ranks) {
  const auto width = static_cast<std::size_t>(problem.shape.hidden_dim);
  const auto size = static_cast<std::size_t>(problem.shape.num_tokens) * width;
  // One sum for each rank, added in ascending order; a rank without routes adds nothing.
  std::vector<std::vector<float>> sums(static_cast<std::size_t>(ranks), std::vector<float>(size));
  for_each_route<float>(
      problem, rounded,
      [&](std::int64_t token, float score, std::int64_t expert, const ExpertRow<float>& row) {
        const std::int64_t owner = expert_owner(problem.shape.num_experts, ranks, expert);
        float* of_token =
            &sums[static_cast<std::size_t>(owner)][static_cast<std::size_t>(token) * width];
        for (std::size_t d = 0; d < width; ++d) of_token[d] += row.h3[d] * score;
      });
  std::vector<BF16> y;
  y.reserve(size);
  for (std::size_t i = 0; i < size; ++i) {
    float sum = 0;
    for (const std::vector<float>& of_rank : sums) sum += of_rank[i];
    y.push_back(to_bf16(sum));
  }
  return y;
}

Tolerance::Tolerance(const MoeProblem& problem)
    : width_(problem.shape.hidden_dim), oracle_(oracle_of(problem)), plain_(plain_of(problem)) {}

std::string Tolerance::first_violation(const std::vector<BF16>& y) const {
  if (y.size() != oracle_.y.size()) return "y has the wrong size";
  const auto width = static_cast<std::size_t>(width_);
  std::ostringstream text;
  const auto check = [&](const std::string& what, std::size_t begin, std::size_t end) {
    Norms norms;
    for (std::size_t i = begin; i < end; ++i) {
      norms.actual += std::pow(to_float(y[i]) - oracle_.y[i], 2);
      norms.plain += std::pow(to_float(plain_[i]) - oracle_.y[i], 2);
      norms.term = std::max(norms.term, oracle_.magnitude[i]);
    }
    if (norms.holds()) return true;
    text << what << ": error " << std::sqrt(norms.actual) << ", plain implementation "
         << std::sqrt(norms.plain) << ", magnitude " << norms.term << ", first element "
         << to_float(y[begin]) << " for " << oracle_.y[begin];
    return false;
  };
  for (std::size_t begin = 0; begin < y.size(); begin += width) {
    if (!check("token " + std::to_string(begin / width), begin, begin + width)) return text.str();
  }
  check("all tokens", 0, y.size());
  return text.str();
}

std::string first_violation(const MoeProblem& problem, const std::vector<BF16>& y) {
  return Tolerance(problem).first_violation(y);
}

std::string first_difference(const std::vector<BF16>& expected, const std::vector<BF16>& actual,
                             std::int64_t width) {
  if (expected.size() != actual.size()) return "different sizes";
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (expected[i].bits == actual[i].bits) continue;
    std::ostringstream text;
    text << "token " << i / static_cast<std::size_t>(width) << ", column "
         << i % static_cast<std::size_t>(width) << ": " << to_float(actual[i]) << " for "
         << to_float(expected[i]);
    return text.str();
  }
  return "";
}

}  // namespace distmoe::conformance
