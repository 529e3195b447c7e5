// SPDX-License-Identifier: Apache-2.0
#include "conformance/coded_h2.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "conformance/coded_values.hpp"
#include "conformance/moe_oracle.hpp"

namespace distmoe::conformance {
namespace {

double rounded(double value) { return to_float(to_bf16(value)); }

/// The BF16 that a value known to lie in an interval can become.
struct Interval {
  double low = 0;
  double high = 0;
};

CodedValues coded_rows(const std::vector<double>& matrix, MatrixShape shape, Precision precision,
                       bool is_weight) {
  return precision == Precision::kNVFP4 ? nvfp4_values(matrix, shape, is_weight)
                                        : mxfp8_values(matrix, shape, 1, 32);
}

void append(const std::vector<BF16>& values, std::int64_t first, std::int64_t count,
            std::vector<double>& to) {
  for (std::int64_t i = first; i < first + count; ++i) {
    to.push_back(to_float(values[static_cast<std::size_t>(i)]));
  }
}

/// Decoded W13 of an expert, gate rows first.
std::vector<double> decoded_w13(const MoeProblem& problem, Precision precision,
                                std::int64_t expert) {
  const std::int64_t d = problem.shape.hidden_dim;
  const std::int64_t f = problem.shape.intermediate_dim;
  std::vector<double> w13;
  append(problem.gate, expert * f * d, f * d, w13);
  append(problem.up, expert * f * d, f * d, w13);
  return coded_rows(w13, {2 * f, d}, precision, true).values;
}

/// h1 as FP32 sums in any order, and the factors and the bias behind them, can leave it. An FP32
/// sum of n terms errs by at most n 2^-24 of the sum of their magnitudes.
Interval h1_interval(std::span<const double> x, std::span<const double> weight, double bias) {
  double sum = bias;
  double magnitude = std::abs(bias);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double term = x[i] * weight[i];
    sum += term;
    magnitude += std::abs(term);
  }
  constexpr double kMoreRoundings = 8;
  const double error = (static_cast<double>(x.size()) + kMoreRoundings) * 0x1p-24 * magnitude;
  return {rounded(sum - error), rounded(sum + error)};
}

/// Appends what h2 of these can be: FP32 SwiGLU errs by some units of its last place.
void append_h2(const MoeProblem& problem, const Interval& gate, const Interval& up, H2Row& row) {
  constexpr double kSwiGLUError = 0x1p-20;
  std::vector<double> values;
  for (const double g : {gate.low, gate.high}) {
    for (const double u : {up.low, up.high}) {
      const double h2 = swiglu_value(problem, g, u);
      values.push_back(rounded(h2 * (1 - kSwiGLUError)));
      values.push_back(rounded(h2 * (1 + kSwiGLUError)));
    }
  }
  auto [least, most] = std::ranges::minmax_element(values);
  if (std::abs(*least) > std::abs(*most)) std::swap(least, most);
  row.least.push_back(*least);
  row.most.push_back(*most);
}

}  // namespace

std::vector<H2Row> coded_h2(const MoeProblem& problem, Precision precision, std::int64_t step) {
  const auto d = static_cast<std::size_t>(problem.shape.hidden_dim);
  const auto f = static_cast<std::size_t>(problem.shape.intermediate_dim);
  const std::int64_t top_k = problem.shape.top_k;
  std::vector<H2Row> rows;
  for (std::int64_t expert = 0; expert < problem.shape.num_experts; ++expert) {
    const std::vector<double> w13 = decoded_w13(problem, precision, expert);
    const auto bias_of = [&](const std::vector<float>& bias, std::size_t i) {
      return bias.empty() ? 0.0 : bias[static_cast<std::size_t>(expert) * f + i];
    };
    for (std::int64_t route = 0; route < problem.num_routes(); ++route) {
      const std::int64_t token = route / top_k;
      if (token % step != 0 || problem.ids[static_cast<std::size_t>(route)] != expert) continue;
      std::vector<double> x;
      append(problem.x, token * problem.shape.hidden_dim, problem.shape.hidden_dim, x);
      x = coded_rows(x, {1, problem.shape.hidden_dim}, precision, false).values;
      H2Row row{.route = route};
      for (std::size_t i = 0; i < f; ++i) {
        const std::span all(w13);
        append_h2(problem, h1_interval(x, all.subspan(i * d, d), bias_of(problem.gate_bias, i)),
                  h1_interval(x, all.subspan((f + i) * d, d), bias_of(problem.up_bias, i)), row);
      }
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

}  // namespace distmoe::conformance
