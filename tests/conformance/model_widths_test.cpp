// SPDX-License-Identifier: Apache-2.0
//
// Invariant: widths of models, in every number of tokens around the tiles and from one expert to
// hundreds, keep to the tolerance in every case; per_route gives the bits of one rank.
#include <gtest/gtest.h>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class ModelWidths : public testing::TestWithParam<MoeShape> {};

std::string shape_name(const testing::TestParamInfo<MoeShape>& info) {
  const MoeShape& s = info.param;
  return "T" + std::to_string(s.num_tokens) + "_D" + std::to_string(s.hidden_dim) + "_F" +
         std::to_string(s.intermediate_dim) + "_E" + std::to_string(s.num_experts) + "_K" +
         std::to_string(s.top_k);
}

// reports: A47: the first is both sides of gpt-oss.
INSTANTIATE_TEST_SUITE_P(
    Laws, ModelWidths,
    testing::Values(MoeShape{65, 2880, 2880, 3, 2}, MoeShape{64, 2880, 192, 12, 4},
                    MoeShape{63, 192, 2880, 12, 4}, MoeShape{1, 1536, 704, 8, 8},
                    MoeShape{65, 704, 1536, 9, 4}, MoeShape{63, 1536, 1536, 3, 3},
                    MoeShape{0, 704, 704, 1, 1}, MoeShape{64, 192, 192, 512, 10},
                    MoeShape{65, 704, 192, 60, 6}, MoeShape{4095, 192, 192, 128, 8},
                    MoeShape{4095, 704, 192, 1, 1}, MoeShape{4095, 192, 704, 3, 3}),
    shape_name);

TEST_P(ModelWidths, KeepToTheToleranceInEveryCase) {
  const MoeShape& shape = GetParam();
  MoeProblem problem = make_problem(shape, RoutePattern::kMixed, 110);
  if (shape.num_tokens % 2 == 1) add_biases(problem, 111);
  const Tolerance tolerance(problem);
  std::vector<BF16> single;
  bool has_run = false;
  for (const MoeCase& moe_case : combine_cases()) {
    if (!why_skipped(moe_case).empty()) continue;
    SCOPED_TRACE(name_of(moe_case));
    const TokenCounts counts = ragged_split(shape.num_tokens, moe_case.ranks, 6);
    const std::vector<BF16> y = run(problem, moe_case, counts);
    if (!has_run) single = y;
    has_run = true;
    if (moe_case.ranks == 1 || moe_case.combine == Combine::kPerRoute) {
      ASSERT_EQ(first_difference(single, y, shape.hidden_dim), "");
    }
    ASSERT_EQ(tolerance.first_violation(y), "");
  }
  if (!has_run) GTEST_SKIP() << why_skipped(combine_cases().front());
}

}  // namespace
}  // namespace distmoe::conformance
