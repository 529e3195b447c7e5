// SPDX-License-Identifier: Apache-2.0
//
// The gradients that a layer must compute, in FP64: plain loops over (token, k) from the formulas
// of the numerics contract and from nothing else. Evaluated twice: with nothing rounded, which
// finite differences of the loss prove, and with every rounding to BF16 that the contract names.
#pragma once

#include <string>
#include <vector>

#include "conformance/moe_problem.hpp"

namespace distmoe::conformance {

/// y and the gradients of sum(y * dy), over all tokens and experts of the group.
struct GradientOracle {
  std::vector<double> y;          ///< [T, D]
  std::vector<double> x;          ///< [T, D]
  std::vector<double> scores;     ///< [T, K]; exactly 0 where the id is -1
  std::vector<double> gate;       ///< [E, F, D]
  std::vector<double> up;         ///< [E, F, D]
  std::vector<double> down;       ///< [E, D, F]
  std::vector<double> gate_bias;  ///< [E, F], also where the problem has no bias
  std::vector<double> up_bias;    ///< [E, F]
  std::vector<double> down_bias;  ///< [E, D]
};

enum class Rounding { kNone, kContract };

/// Post-expert RMSNorm of every route; eps 0 means none.
struct OracleNorm {
  double eps = 0.0;
  std::vector<double> gain = {};  ///< [D], of the forward alone; empty: 1
};

/// `is_lean`: as activation_policy lean has it, the score multiplies behind a = W2^T dy and its
/// gradient is a h2 + dy bias2; without rounding both policies are the same.
GradientOracle gradient_oracle(const MoeProblem& problem, const std::vector<BF16>& dy,
                               Rounding rounding, bool is_lean = false,
                               const OracleNorm& norm = {});

/// sum(y * dy) in FP64, nothing rounded: for finite differences.
double loss_of(const MoeProblem& problem, const std::vector<BF16>& dy);

/// |actual - expected| / |expected| as 2-norms; |actual| where all expected are 0.
template <typename Value>
double relative_error(const std::vector<Value>& actual, const std::vector<double>& expected);
extern template double relative_error(const std::vector<double>&, const std::vector<double>&);
extern template double relative_error(const std::vector<float>&, const std::vector<double>&);

/// dy of a problem: random BF16 of the seed, [T, D].
std::vector<BF16> make_dy(const MoeProblem& problem, std::uint64_t seed);

}  // namespace distmoe::conformance
