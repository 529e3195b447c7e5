// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a plan that does not fit a budget is a value; each suggested value fits and the next
// larger one does not, found here by trying every value.
#include <gtest/gtest.h>

#include <random>

#include "distmoe/memory_plan.hpp"
#include "plan/plan_testing.hpp"

namespace distmoe {
namespace {

std::int64_t allocated(const Config& config, int ep_size) {
  return plan_memory(config, ep_size).allocated_bytes;
}

TEST(Budget, SaysThatAPlanFitsToTheByte) {
  const std::int64_t bytes = allocated(small_config(), 4);
  EXPECT_TRUE(check_budget(small_config(), 4, bytes).fits);
  const BudgetReport report = check_budget(small_config(), 4, bytes - 1);
  EXPECT_FALSE(report.fits);
  EXPECT_EQ(report.needed_bytes, bytes);
  EXPECT_EQ(report.budget_bytes, bytes - 1);
  EXPECT_EQ(report.largest_max_tokens, 63);
}

TEST(Budget, LargestValuesFitAndTheNextOnesDoNot) {
  Config config = small_config();
  config.num_activation_slots = 6;
  config.activation_slot_capacity_factor = 0.7;
  const std::int64_t budget = allocated(config, 4) * 19 / 20;
  const BudgetReport report = check_budget(config, 4, budget);
  ASSERT_TRUE(report.largest_max_tokens && report.largest_num_slots);
  Config changed = config;
  changed.max_tokens = *report.largest_max_tokens;
  EXPECT_LE(allocated(changed, 4), budget);
  changed.max_tokens += 1;
  EXPECT_GT(allocated(changed, 4), budget);
  changed = config;
  changed.num_activation_slots = *report.largest_num_slots;
  EXPECT_LE(allocated(changed, 4), budget);
  changed.num_activation_slots += 1;
  EXPECT_GT(allocated(changed, 4), budget);
}

TEST(Budget, LargestTokensAreTheLargestOfAllWhereSizesGoUpAndDown) {
  std::mt19937 random(11);
  for (int i = 0; i < 60; ++i) {
    Config config = small_config();
    const std::int64_t width = std::uniform_int_distribution<>(1, 9)(random);
    config.intermediate_dim = width;
    config.hidden_dim = width + std::uniform_int_distribution<>(0, 1)(random);
    config.max_tokens = std::uniform_int_distribution<>(1, 300)(random);
    const int ranks = std::uniform_int_distribution<>(1, 5)(random);
    const std::int64_t budget = allocated(config, ranks);
    std::int64_t largest = 0;
    for (Config any = config; any.max_tokens <= 800;) {
      if (allocated(any, ranks) <= budget) largest = any.max_tokens;
      any.max_tokens += 1;
    }
    EXPECT_EQ(check_budget(config, ranks, budget).largest_max_tokens, largest) << width;
  }
}

TEST(Budget, LargestFactorFitsAndOneMoreRowDoesNot) {
  Config config = small_config();
  const std::int64_t budget = allocated(config, 4) - 50000;
  const BudgetReport report = check_budget(config, 4, budget);
  ASSERT_TRUE(report.largest_scratch_factor);
  EXPECT_LT(*report.largest_scratch_factor, 2.0);
  config.device_scratch_capacity_factor = *report.largest_scratch_factor;
  EXPECT_LE(allocated(config, 4), budget);
  config.device_scratch_capacity_factor += 1.0 / (64 * 3);
  EXPECT_GT(allocated(config, 4), budget);
}

TEST(Budget, HostScratchCountsOnTheCpuAlone) {
  Config config = small_config();
  config.host_scratch = HostScratch{4.0, true};
  const MemoryPlan plan = plan_memory(config, 4);
  ASSERT_GT(plan.host_scratch_bytes, 0);
  const std::int64_t on_device = plan.allocated_bytes - plan.host_scratch_bytes;
  EXPECT_FALSE(check_budget(config, 4, on_device).fits);
  EXPECT_EQ(check_budget(config, 4, on_device).needed_bytes, plan.allocated_bytes);
  EXPECT_LT(*check_budget(config, 4, on_device).largest_scratch_factor, 4.0);
  const PlanTarget cuda{BackendKind::kCuda, 1};
  EXPECT_TRUE(check_budget(config, 4, on_device, cuda).fits);
}

TEST(Budget, FactorEndsAtTheRanks) {
  EXPECT_EQ(check_budget(small_config(), 4, std::int64_t{1} << 40).largest_scratch_factor, 4.0);
}

TEST(Budget, NothingFitsInNothing) {
  const BudgetReport report = check_budget(small_config(), 4, 0);
  EXPECT_FALSE(report.fits);
  EXPECT_FALSE(report.largest_max_tokens);
  EXPECT_FALSE(report.largest_num_slots);
  EXPECT_FALSE(report.largest_scratch_factor);
  const std::string text = explain(report);
  EXPECT_NE(text.find("does not fit"), std::string::npos) << text;
  EXPECT_NE(text.find("largest max_tokens that fits, all else equal: none"), std::string::npos);
}

TEST(Budget, InferenceHasNoSlotsToSuggest) {
  Config config = small_config();
  config.inference = true;
  EXPECT_FALSE(check_budget(config, 4, std::int64_t{1} << 40).largest_num_slots);
}

TEST(Budget, RefusesANegativeBudgetAndABrokenConfig) {
  expect_error(
      ErrorCode::kInvalidArgument, [] { check_budget(small_config(), 4, -5); }, "the budget is -5",
      "0 or more");
  expect_error(
      ErrorCode::kInvalidArgument, [] { check_budget(Config{}, 4, 5); }, "max_tokens is 0");
}

TEST(Budget, AFactorWithoutRowsIsSuggestedForAPlanThatHasItAndFits) {
  Config config = small_config();
  config.device_scratch_capacity_factor = 1e-9;
  const MemoryPlan plan = plan_memory(config, 4);
  ASSERT_EQ(plan.total_scratch_rows, 0);
  const BudgetReport report = check_budget(config, 4, plan.allocated_bytes);
  EXPECT_TRUE(report.fits);
  EXPECT_EQ(report.largest_scratch_factor, 1e-9);
  EXPECT_FALSE(check_budget(config, 4, plan.allocated_bytes - 1).largest_scratch_factor);
  config.host_scratch = HostScratch{2e-9, true};
  EXPECT_EQ(check_budget(config, 4, plan.allocated_bytes).largest_scratch_factor, 2e-9);
}

TEST(Budget, TextSaysWhichScratchFactorItSuggests) {
  const std::int64_t much = std::int64_t{1} << 40;
  const auto text_for = [&](const Config& config, BackendKind backend) {
    return explain(check_budget(config, 4, much, {backend, 1}));
  };
  Config config = small_config();
  constexpr const char* kDevice = "largest device scratch capacity factor that fits";
  EXPECT_NE(text_for(config, BackendKind::kCpu).find(kDevice), std::string::npos);
  config.host_scratch = HostScratch{};
  EXPECT_NE(text_for(config, BackendKind::kCuda).find(kDevice), std::string::npos);
  EXPECT_NE(text_for(config, BackendKind::kCpu).find("largest total scratch capacity factor"),
            std::string::npos);
}

}  // namespace
}  // namespace distmoe
