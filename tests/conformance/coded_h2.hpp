// SPDX-License-Identifier: Apache-2.0
//
// h2 of a layer of a low precision, from the decoded codes of coded_values.hpp in FP64, with what
// the order of FP32 sums leaves open: an h1 that lies near the middle of two BF16 may be rounded to
// either.
#pragma once

#include <cstdint>
#include <vector>

#include "conformance/moe_problem.hpp"

namespace distmoe::conformance {

/// Of one route: the two BF16 between which h2 is, column by column, that of smaller magnitude and
/// the other. They are equal where every order of the sums gives the same.
struct H2Row {
  std::int64_t route = 0;  ///< token * K + k
  std::vector<double> least{};
  std::vector<double> most{};
};

/// Those of every `step`-th token, of an inference context; disabled routes have none.
std::vector<H2Row> coded_h2(const MoeProblem& problem, Precision precision, std::int64_t step);

}  // namespace distmoe::conformance
