// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a context allocates what its plan says, and what it could keep changes no bit.
#include <gtest/gtest.h>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class Memory : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, Memory, testing::ValuesIn(combine_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Coded, Memory, testing::ValuesIn(coded_cases()), case_name);

MoeProblem problem_of(const MoeCase& moe_case, std::uint64_t seed) {
  return make_problem(fit({.num_tokens = 20,
                           .hidden_dim = 33,
                           .intermediate_dim = 17,
                           .num_experts = 7,
                           .top_k = 3},
                          moe_case),
                      RoutePattern::kMixed, seed);
}

TEST_P(Memory, AContextAllocatesItsPlanToTheByte) {
  const MoeProblem problem = problem_of(GetParam(), 120);
  for (const bool inference : {true, false}) {
    if (!inference && !contract_of(GetParam()).trains) continue;
    Config config = config_of(problem, GetParam(), {}, 20);
    config.inference = inference;
    const MemoryPlan plan =
        plan_memory(config, GetParam().ranks,
                    {.backend = GetParam().backend, .num_threads = GetParam().num_threads});
    run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
      Context context = make_context(config, GetParam(), communicator);
      EXPECT_EQ(context.memory_plan(), plan);
      EXPECT_EQ(context.allocated_bytes(), plan.allocated_bytes);
      communicator->barrier(std::chrono::seconds(60));
    });
  }
}

/// A context that could save gives the bits of one that cannot.
TEST_P(Memory, ATrainingContextComputesTheSame) {
  if (GetParam().precision != Precision::kBF16) GTEST_SKIP() << "weights have tiles in training";
  const MoeProblem problem = problem_of(GetParam(), 121);
  const TokenCounts counts = even_split(20, GetParam().ranks);
  Config config = config_of(problem, GetParam(), {}, 20);
  config.inference = false;
  const std::vector<BF16> expected = run(problem, GetParam());
  run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(config, GetParam(), communicator);
    const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
    call_experts(context, call);
    const std::int64_t width = problem.shape.hidden_dim;
    const auto y = gather_rows(*communicator, call.y_rows(), counts, width);
    EXPECT_EQ(first_difference(expected, y, width), "");
  });
}

}  // namespace
}  // namespace distmoe::conformance
