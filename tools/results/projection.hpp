// SPDX-License-Identifier: Apache-2.0
//
// What more GPUs than were there would take, from measurements on one and on two.
#pragma once

#include <cstdint>
#include <vector>

#include "results/result_groups.hpp"

namespace distmoe::tools {

/// Of one shape with T tokens of each rank; times in microseconds.
struct Projection {
  const ResultRow* one = nullptr;  ///< measured on one rank
  const ResultRow* two = nullptr;  ///< and on two
  double link_of_two_us = 0.0;     ///< the rows that cross a link on two ranks, at its rate
  double seen = 0.0;               ///< of link_of_two_us, what two ranks took longer than one
  double link_us = 0.0;            ///< the rows that cross a link on all ranks
  double us = 0.0;                 ///< projected

  bool is_unstable() const { return one->is_unstable || two->is_unstable; }
};

inline constexpr std::int64_t kProjectedRanks = 8;

/// Microseconds that the rows of a call take over a rank's link: with uniform routing to distinct
/// experts a token goes once to each other rank that it needs, and a row comes back for each of its
/// routes there.
double link_us_of(const ResultRow& row, std::int64_t num_ranks, std::int64_t num_experts,
                  double link_gb_s);

/// Of every forward that the products of one rank decide and that was measured with the same
/// tokens on one rank and on two with a link between them, with uniform routing and combine
/// per_route. The more of the link's time two ranks showed, the more is projected of it; never less
/// than the link beside the products takes.
std::vector<Projection> projections_of(const ResultGroup& rows);

}  // namespace distmoe::tools
