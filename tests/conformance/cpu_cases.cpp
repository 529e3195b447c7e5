// SPDX-License-Identifier: Apache-2.0
#include "conformance/moe_case.hpp"

namespace distmoe::conformance {

std::vector<MoeCase> all_cases() {
  std::vector<MoeCase> cases;
  for (const int ranks : {1, 2, 3, 4, 5, 8}) {
    cases.push_back({.ranks = ranks, .num_threads = 1});
    cases.push_back({.ranks = ranks, .num_threads = ranks == 2 ? 4 : 2});
    cases.push_back({.ranks = ranks, .num_threads = 2, .combine = Combine::kPerRank});
  }
  return cases;
}

std::vector<MoeCase> some_cases() {
  return {{.ranks = 1, .num_threads = 2}, {.ranks = 3, .num_threads = 1}, {.ranks = 8}};
}

std::vector<MoeCase> combine_cases() {
  std::vector<MoeCase> cases = some_cases();
  for (const int ranks : {2, 3, 8}) {
    cases.push_back({.ranks = ranks, .num_threads = 2, .combine = Combine::kPerRank});
  }
  return cases;
}

std::vector<MoeCase> training_cases() {
  return {{.ranks = 1, .num_threads = 1},
          {.ranks = 1, .num_threads = 2},
          {.ranks = 2, .num_threads = 2},
          {.ranks = 3, .num_threads = 1},
          {.ranks = 4, .num_threads = 2}};
}

std::vector<MoeCase> group_cases() {
  return {{.ranks = 2, .num_threads = 2}, {.ranks = 3, .num_threads = 1}, {.ranks = 5}};
}

std::vector<MoeCase> lifetime_cases() {
  return {{.ranks = 1, .num_threads = 3}, {.ranks = 3, .num_threads = 2}};
}

std::vector<MoeCase> report_cases() { return {MoeCase{}}; }

}  // namespace distmoe::conformance
