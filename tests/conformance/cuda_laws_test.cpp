// SPDX-License-Identifier: Apache-2.0
//
// The laws of the suite for the cases of CUDA are linked to this file, and what a context on a GPU
// holds is its plan, whatever it combines.
#include <gtest/gtest.h>

#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class CudaMemory : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, CudaMemory, testing::ValuesIn(all_cases()), case_name);

TEST_P(CudaMemory, AContextAllocatesItsPlan) {
  const MoeCase& moe_case = GetParam();
  const MoeProblem problem = make_problem({64, 64, 32, 7, 3}, RoutePattern::kDistinct, 1);
  const Config config = config_of(problem, moe_case, {}, 64);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(config, moe_case, communicator);
    const MemoryPlan plan = plan_memory(config, moe_case.ranks, {BackendKind::kCuda, 1});
    EXPECT_EQ(context.memory_plan(), plan);
    EXPECT_EQ(context.allocated_bytes(), plan.allocated_bytes);
    communicator->barrier(std::chrono::seconds(60));
  });
}

}  // namespace
}  // namespace distmoe::conformance
