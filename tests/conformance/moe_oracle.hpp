// SPDX-License-Identifier: Apache-2.0
//
// What a layer must compute: plain loops over (token, k), written from the formulas of the numerics
// contract and from nothing else. No sort, no exchange, no layout.
#pragma once

#include <string>
#include <vector>

#include "conformance/moe_problem.hpp"

namespace distmoe::conformance {

/// y in FP64, nothing rounded on the way.
struct Oracle {
  std::vector<double> y;          ///< [T, D]
  std::vector<double> magnitude;  ///< [T, D], how far one ulp of BF16 inside the layer can move y
};
Oracle oracle_of(const MoeProblem& problem);

/// SwiGLU of the layer, plain or clamped.
double swiglu_value(const MoeProblem& problem, double g, double u);

/// A straightforward implementation in the library's precision: FP32 sums from left to right; h1,
/// h2, h3 and y rounded to BF16. With `ranks` above 1 as combine per_rank sums.
std::vector<BF16> plain_of(const MoeProblem& problem, int ranks = 1);

/// The tolerance of the suite: |y - oracle| is at most 1.5 |plain - oracle| and a rounding term, as
/// 2-norms over every row and over all rows. Empty where y keeps to it, else the worst row in
/// words.
std::string first_violation(const MoeProblem& problem, const std::vector<BF16>& y);

/// The same for many results of one problem.
class Tolerance {
 public:
  explicit Tolerance(const MoeProblem& problem);
  std::string first_violation(const std::vector<BF16>& y) const;

 private:
  std::int64_t width_;
  Oracle oracle_;
  std::vector<BF16> plain_;
};

/// Where two results differ bit by bit, in words; empty where they are equal.
std::string first_difference(const std::vector<BF16>& expected, const std::vector<BF16>& actual,
                             std::int64_t width);

}  // namespace distmoe::conformance
