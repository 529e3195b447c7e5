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

std::vector<MoeCase> coded_cases() {
  std::vector<MoeCase> cases;
  for (const Precision precision : {Precision::kMXFP8, Precision::kNVFP4, Precision::kMXFP4}) {
    for (const int ranks : {1, 2, 3, 4}) {
      cases.push_back({.ranks = ranks,
                       .num_threads = ranks == 2 ? 1 : 2,
                       .precision = precision,
                       .pipeline = ranks % 2 == 0 ? Pipeline::kMega : Pipeline::kStaged,
                       .is_prepared = ranks > 2});
    }
    cases.push_back({.num_threads = 1, .precision = precision, .pipeline = Pipeline::kMega});
    cases.push_back({.ranks = 3, .combine = Combine::kPerRank, .precision = precision});
  }
  return cases;
}

std::vector<MoeCase> coded_group_cases() {
  std::vector<MoeCase> cases = coded_cases();
  std::erase_if(cases, [](const MoeCase& moe_case) {
    return moe_case.ranks == 1 || moe_case.combine == Combine::kPerRank;
  });
  return cases;
}

std::vector<MoeCase> coded_training_cases() {
  std::vector<MoeCase> cases;
  for (const MoeCase& moe_case : coded_cases()) {
    if (contract_of(moe_case).trains && moe_case.combine == Combine::kPerRoute) {
      cases.push_back(moe_case);
    }
  }
  return cases;
}

std::vector<MoeCase> group_cases() {
  return {{.ranks = 2, .num_threads = 2}, {.ranks = 3, .num_threads = 1}, {.ranks = 5}};
}

std::vector<MoeCase> lifetime_cases() {
  return {{.ranks = 1, .num_threads = 3}, {.ranks = 3, .num_threads = 2}};
}

std::vector<MoeCase> report_cases() { return {MoeCase{}}; }

}  // namespace distmoe::conformance
