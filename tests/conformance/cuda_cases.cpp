// SPDX-License-Identifier: Apache-2.0
//
// Ranks that share a GPU, so that one GPU tests four of them, and ranks of two GPUs.
#include "conformance/moe_case.hpp"

namespace distmoe::conformance {
namespace {

std::vector<MoeCase> cases_of(Combine combine, const std::vector<std::vector<int>>& placements) {
  std::vector<MoeCase> cases;
  cases.reserve(placements.size());
  for (const std::vector<int>& devices : placements) {
    cases.push_back({.backend = BackendKind::kCuda,
                     .ranks = static_cast<int>(devices.size()),
                     .combine = combine,
                     .devices = devices});
  }
  return cases;
}

std::vector<MoeCase> joined(std::vector<MoeCase> cases, const std::vector<MoeCase>& more) {
  cases.insert(cases.end(), more.begin(), more.end());
  return cases;
}

}  // namespace

std::vector<MoeCase> all_cases() {
  const std::vector<std::vector<int>> placements = {{0},    {0, 0}, {0, 0, 0}, {0, 0, 0, 0},
                                                    {0, 1}, {1, 0}, {0, 1, 0}};
  return joined(cases_of(Combine::kPerRoute, placements), cases_of(Combine::kPerRank, placements));
}

std::vector<MoeCase> some_cases() { return cases_of(Combine::kPerRoute, {{0}, {0, 0, 0}, {0, 1}}); }

std::vector<MoeCase> combine_cases() {
  return joined(some_cases(), cases_of(Combine::kPerRank, {{0}, {0, 0, 0, 0}, {0, 1}}));
}

std::vector<MoeCase> training_cases() {
  return cases_of(Combine::kPerRoute, {{0}, {0, 0}, {0, 0, 0}, {0, 0, 0, 0}, {0, 1}});
}

std::vector<MoeCase> coded_cases() { return {}; }
std::vector<MoeCase> coded_group_cases() { return {}; }
std::vector<MoeCase> coded_training_cases() { return {}; }

std::vector<MoeCase> group_cases() {
  return joined(cases_of(Combine::kPerRoute, {{0, 0}, {0, 0, 0}, {0, 1}}),
                cases_of(Combine::kPerRank, {{0, 0, 0}, {0, 1}}));
}

std::vector<MoeCase> lifetime_cases() { return some_cases(); }

std::vector<MoeCase> report_cases() { return cases_of(Combine::kPerRoute, {{0}, {0, 1}}); }

}  // namespace distmoe::conformance
