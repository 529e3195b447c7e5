// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <vector>

#include "results/result_groups.hpp"

namespace distmoe::tools {

/// Which of some results count: of a call that was measured more than once on a machine the newest.
struct ResultChoice {
  ResultGroup shown;  ///< one of every call
  std::vector<std::string>
      again;  ///< "OLMoE, forward, T = 64: that of 2026-12-01T... counts, not ..."
};

ResultChoice choose_results(std::span<const ResultRow> rows);

/// Without those that are wrong, of whose times nothing is made.
ResultGroup right_of(const ResultGroup& rows);

}  // namespace distmoe::tools
