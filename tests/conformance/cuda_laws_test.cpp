// SPDX-License-Identifier: Apache-2.0
//
// The laws of the suite for the cases of CUDA are linked to this file. Invariant of its own:
// contexts that closed, in whatever order on the ranks, leave no memory of a GPU behind.
#include <gtest/gtest.h>

#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class CudaMemory : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, CudaMemory, testing::ValuesIn(some_cases()), case_name);

/// Together more than any GPU has.
TEST_P(CudaMemory, ContextsThatClosedLeaveRoomForOthers) {
  const MoeCase& moe_case = GetParam();
  const MoeProblem problem = make_problem({64, 64, 32, 7, 3}, RoutePattern::kDistinct, 1);
  const Config config = config_of(problem, moe_case, {}, 1 << 20);
  constexpr std::int64_t kMoreThanAGpu = std::int64_t{300} << 30;
  const MemoryPlan plan = plan_memory(config, moe_case.ranks, {.backend = BackendKind::kCuda});
  const std::int64_t num_contexts = kMoreThanAGpu / plan.allocated_bytes + 1;
  ASSERT_LT(num_contexts, 500);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    for (std::int64_t i = 0; i < num_contexts; ++i) {
      Context context = make_context(config, moe_case, communicator);
      ASSERT_EQ(context.allocated_bytes(), plan.allocated_bytes);
      // One rank at another time than the others.
      if (communicator->rank() == i % moe_case.ranks) context.close();
      communicator->barrier(std::chrono::seconds(60));
    }
  });
}

}  // namespace
}  // namespace distmoe::conformance
