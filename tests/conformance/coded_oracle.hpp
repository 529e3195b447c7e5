// SPDX-License-Identifier: Apache-2.0
//
// What a layer of a low precision must compute, in FP64: the operands of every product are the
// decoded codes of coded_values.hpp, h1, h2, h3 and what flows back are rounded to BF16 where the
// contract says so, and nothing else is rounded.
#pragma once

#include <vector>

#include "conformance/gradient_oracle.hpp"
#include "conformance/moe_problem.hpp"

namespace distmoe::conformance {

/// Multiplies features, tokens and inner columns by powers of two that cancel in every product, so
/// that each of them still counts while the elements of a block differ by more than its format
/// spans: what is lost tells which elements share a scale.
void spread_magnitudes(MoeProblem& problem);
/// dy whose tokens count alike in the weights' gradients of such a problem.
std::vector<BF16> make_spread_dy(const MoeProblem& problem, std::uint64_t seed);

/// y [T, D] of an inference context.
std::vector<double> coded_forward(const MoeProblem& problem, Precision precision,
                                  const OracleNorm& norm = {});

/// y and gradients of an MXFP8 training context.
GradientOracle coded_gradients(const MoeProblem& problem, const std::vector<BF16>& dy,
                               const OracleNorm& norm = {});

}  // namespace distmoe::conformance
