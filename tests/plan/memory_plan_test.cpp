// SPDX-License-Identifier: Apache-2.0
//
// Invariant: plan_memory returns the numbers of docs/memory-plan.md, worked out by hand here, and
// refuses, with the values, what does not fit in 64 bits or breaks a rule that needs P.
#include "distmoe/memory_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "layout/context_buffers.hpp"
#include "layout/cpu_workspace.hpp"
#include "plan/plan_testing.hpp"

namespace distmoe {
namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

Config large_config() {
  Config config;
  config.max_tokens = 4096;
  config.top_k = 8;
  config.hidden_dim = 4096;
  config.intermediate_dim = 14336;
  config.num_experts = 128;
  config.max_moe_layers_per_activation_slot = 32;
  config.device_scratch_capacity_factor = 1.5;
  config.host_scratch = HostScratch{};
  return config;
}

Config routed_config(std::int64_t tokens, std::int64_t top_k, std::int64_t experts) {
  Config config = small_config();
  config.max_tokens = tokens;
  config.top_k = top_k;
  config.num_experts = experts;
  return config;
}

TEST(MemoryPlan, MatchesTheCheckValue) {
  const MemoryPlan plan = plan_memory(large_config(), 16);
  EXPECT_EQ(plan.balanced_rows, 32768);
  EXPECT_EQ(plan.device_scratch_rows, 49152);
  EXPECT_EQ(plan.total_scratch_rows, 524288);
  EXPECT_EQ(plan.device_scratch_bytes, 7'449'083'904);
  EXPECT_EQ(plan.host_scratch_bytes, 72'007'811'072);
  EXPECT_EQ(plan.minimum_slot_bytes, 1'073'741'824);
  EXPECT_EQ(plan.balanced_slot_bytes, 77'309'411'328);
  EXPECT_EQ(plan.slot_bytes, plan.minimum_slot_bytes);
  EXPECT_EQ(plan.saved_input_bytes_per_layer, 33'554'432);
  EXPECT_EQ(plan.saved_bytes_per_layer_balanced, 77'309'411'328 / 32);
  EXPECT_EQ(plan.total_device_bytes, 1'073'741'824 + 7'449'083'904);
  EXPECT_EQ(plan.total_virtual_bytes, plan.total_device_bytes + 72'007'811'072);
}

TEST(MemoryPlan, ExactSlotBytesRoundUpAndStopAtTheMinimum) {
  Config config = large_config();
  config.activation_slot_bytes = 1'073'741'825;
  EXPECT_EQ(plan_memory(config, 16).slot_bytes, 1'073'741'824 + 128);
  config.activation_slot_bytes = 1'073'741'823;
  expect_error(
      ErrorCode::kInvalidArgument, [&] { plan_memory(config, 16); },
      "activation_slot_bytes is 1073741823", "minimum required 1073741824");
}

TEST(MemoryPlan, SlotFactorInterpolatesFromMinimumToBalanced) {
  Config config = large_config();
  for (const auto& [factor, bytes] : {std::pair{0.0, std::int64_t{1'073'741'824}},
                                      {0.5, 1'073'741'824 + 38'117'834'752},
                                      {1.0, 77'309'411'328},
                                      {1.5, 1'073'741'824 + 114'353'504'256}}) {
    config.activation_slot_capacity_factor = factor;
    EXPECT_EQ(plan_memory(config, 16).slot_bytes, bytes) << factor;
  }
}

TEST(MemoryPlan, SlotsMultiplyTheSlotAndTheSavedMetadata) {
  Config config = large_config();
  const MemoryPlan one = plan_memory(config, 16);
  config.num_activation_slots = 3;
  const MemoryPlan three = plan_memory(config, 16);
  EXPECT_EQ(three.total_activation_bytes, 3 * one.slot_bytes);
  EXPECT_EQ(one.metadata_bytes % 33, 0);  // 32 saved sets and one of forward-only calls
  EXPECT_EQ(three.metadata_bytes, one.metadata_bytes / 33 * 97);
}

TEST(MemoryPlan, InferenceKeepsNothingButReportsTheInput) {
  Config config = large_config();
  config.inference = true;
  config.num_activation_slots = 5;
  const MemoryPlan plan = plan_memory(config, 16);
  EXPECT_EQ(plan.num_slots, 0);
  EXPECT_EQ(plan.slot_bytes, 0);
  EXPECT_EQ(plan.minimum_slot_bytes, 0);
  EXPECT_EQ(plan.max_useful_slot_bytes, 0);
  EXPECT_EQ(plan.total_activation_bytes, 0);
  EXPECT_EQ(plan.saved_bytes_per_layer_balanced, 0);
  EXPECT_EQ(plan.saved_input_bytes_per_layer, 33'554'432);
  // x, h1 and h2 of 49152 rows.
  EXPECT_EQ(plan.device_scratch_bytes, 49152LL * 2 * (4096 + 2 * 14336 + 14336));
}

TEST(MemoryPlan, LeanKeepsOwnInputAndH1) {
  Config config = large_config();
  config.activation_policy = ActivationPolicy::kLean;
  const MemoryPlan lean = plan_memory(config, 16);
  EXPECT_EQ(lean.saved_bytes_per_layer_balanced, 4096LL * 4096 * 2 + 32768LL * 2 * 14336 * 2);
  EXPECT_EQ(lean.device_scratch_bytes, 7'449'083'904);
}

TEST(MemoryPlan, MXFP8SizesOfOneExpertByHand) {
  Config config = small_config();  // T=64 K=3 D=96 F=160
  config.precision = Precision::kMXFP8;
  config.num_experts = 3;
  const MemoryPlan plan = plan_memory(config, 1);
  // 192 rows padded for 3 experts: floor((192 + 381) / 128) * 128.
  EXPECT_EQ(plan.device_scratch_rows, 512);
  // row(512, 320) = 512*320 + 512*10 is the widest; columns: codes, then scales of 16 blocks.
  const std::int64_t rowslot = 163840 + 5120;
  const std::int64_t col_x = 49152 + 1536;
  const std::int64_t col_h2 = 81920 + 2560;
  const std::int64_t col_grad_h1 = 163840 + 5120;
  EXPECT_EQ(plan.device_scratch_bytes,
            rowslot + col_x + 512 * 320 * 2 + col_h2 + col_x + 512 * 160 * 2 + col_grad_h1);
  EXPECT_EQ(plan.saved_bytes_per_layer_balanced, col_x + 512 * 320 * 2 + col_h2 + 64 * 3 * 96 * 2);
  config.pipeline = Pipeline::kMega;  // row(512,96) + row(512,160) = 137216 stays under row of 2F
  EXPECT_EQ(plan_memory(config, 1).device_scratch_bytes, plan.device_scratch_bytes);
}

TEST(MemoryPlan, NVFP4RowsCarryAFactorEach) {
  Config config = small_config();
  config.precision = Precision::kNVFP4;
  config.inference = true;
  config.num_experts = 3;
  // 512 rows: codes two a byte, one scale per 16, four bytes a row.
  const std::int64_t row_x = 512 * 48 + 512 * 6 + 512 * 4;
  const std::int64_t row_h2 = 512 * 80 + 512 * 10 + 512 * 4;
  const std::int64_t h1 = 512 * 320 * 2;
  EXPECT_EQ(plan_memory(config, 1).device_scratch_bytes, row_h2 + h1);
  config.pipeline = Pipeline::kMega;
  EXPECT_EQ(plan_memory(config, 1).device_scratch_bytes, row_x + row_h2 + h1);
}

TEST(MemoryPlan, MXFP4WeightsPlanLikeBF16) {
  Config config = small_config();
  config.inference = true;
  MemoryPlan expected = plan_memory(config, 2);
  config.precision = Precision::kMXFP4;
  // But for the tiles that weights are decoded into.
  const std::int64_t tiles = CpuWorkspaceLayout(config).bytes - expected.workspace_bytes;
  EXPECT_GE(tiles, 2 * 160 * kCpuPackedColumns);
  expected.workspace_buffers[0].bytes += tiles;
  expected.workspace_bytes += tiles;
  expected.allocated_bytes += tiles;
  EXPECT_EQ(plan_memory(config, 2), expected);
}

TEST(MemoryPlan, PaddedRowsAreCounted) {  // reports: A40, A55
  Config config = routed_config(44, 1, 1);
  config.precision = Precision::kMXFP8;
  EXPECT_EQ(plan_memory(config, 1).total_scratch_rows, 128);
  config.max_tokens = 16333;
  EXPECT_EQ(plan_memory(config, 1).total_scratch_rows, 16384);
  config = routed_config(1, 8, 256);
  EXPECT_EQ(plan_memory(config, 1).total_scratch_rows, 8);
  config.precision = Precision::kMXFP8;
  EXPECT_EQ(plan_memory(config, 1).total_scratch_rows, 32512 / 128 * 128);
}

TEST(MemoryPlan, PlansACollapsedRouterWhereAskedTo) {  // reports: A14
  Config config = routed_config(64, 1, 16);
  config.device_scratch_capacity_factor = 4.0;
  EXPECT_EQ(plan_memory(config, 4).total_scratch_rows, 256);
  config.device_scratch_capacity_factor = 1.5;
  EXPECT_EQ(plan_memory(config, 4).total_scratch_rows, 96);
}

TEST(MemoryPlan, RowsAreNeitherRoundedUpNorCut) {  // reports: A17
  Config config = routed_config(64, 1, 16);
  config.device_scratch_capacity_factor = 1.0;
  EXPECT_EQ(plan_memory(config, 4).total_scratch_rows, 64);
  config.max_tokens = 65;
  EXPECT_EQ(plan_memory(config, 4).total_scratch_rows, 65);
  config.max_tokens = 65537;
  EXPECT_EQ(plan_memory(config, 4).total_scratch_rows, 65537);
}

TEST(MemoryPlan, DistinctExpertsBoundTheRows) {
  Config config = routed_config(64, 4, 8);  // 2 experts a rank on 4 ranks
  config.device_scratch_capacity_factor = 4.0;
  EXPECT_EQ(plan_memory(config, 4).total_scratch_rows, 64 * 4 * 2);
  config.distinct_experts = false;
  EXPECT_EQ(plan_memory(config, 4).total_scratch_rows, 64 * 4 * 4);
}

TEST(MemoryPlan, RowsRoundHalfUpAfterOneProduct) {
  Config config = routed_config(5, 1, 4);
  config.device_scratch_capacity_factor = 0.5;  // 2.5 rows
  EXPECT_EQ(plan_memory(config, 4).total_scratch_rows, 3);
  config.device_scratch_capacity_factor = 0.49;
  EXPECT_EQ(plan_memory(config, 4).total_scratch_rows, 2);
  // 3 * 0.8333333333333333 is just under 2.5 exactly and 2.5 as a double.
  config = routed_config(3, 1, 4);
  config.device_scratch_capacity_factor = 0.8333333333333333;
  EXPECT_EQ(plan_memory(config, 4).total_scratch_rows, 3);
}

TEST(MemoryPlan, FactorsAreCappedAtTheRanks) {
  Config config = routed_config(64, 2, 16);
  config.device_scratch_capacity_factor = 2.5;
  config.host_scratch = HostScratch{16.0, true};
  const MemoryPlan plan = plan_memory(config, 2);
  EXPECT_EQ(plan.device_scratch_factor, 2.0);
  EXPECT_EQ(plan.total_scratch_factor, 2.0);
  EXPECT_EQ(plan.host_scratch_bytes, 0);
  const MemoryPlan wide = plan_memory(config, 8);
  EXPECT_EQ(wide.device_scratch_factor, 2.5);
  EXPECT_EQ(wide.total_scratch_factor, 8.0);
  EXPECT_GT(wide.host_scratch_bytes, 0);
}

TEST(MemoryPlan, TotalFactorMustCoverTheDeviceFactor) {
  Config config = small_config();
  config.device_scratch_capacity_factor = 3.0;
  config.host_scratch = HostScratch{1.25, true};
  expect_error(
      ErrorCode::kInvalidArgument, [&] { plan_memory(config, 4); },
      "total_scratch_capacity_factor is 1.25", "must cover at least", "3");
  EXPECT_NO_THROW(plan_memory(config, 1));  // both are 1 after the cap
}

TEST(MemoryPlan, RanksAndThreadsMustBePositive) {
  expect_error(
      ErrorCode::kInvalidArgument, [] { plan_memory(small_config(), 0); }, "ep_size is 0",
      "1 or more");
  const PlanTarget target{BackendKind::kCpu, 0};
  expect_error(
      ErrorCode::kInvalidArgument, [&] { plan_memory(small_config(), 1, target); },
      "num_threads is 0", "1 or more");
}

TEST(MemoryPlan, SizesBeyondFourGiBAreExact) {  // reports: A77, A80
  Config config = routed_config(100000, 6, 64);
  config.hidden_dim = 7168;
  config.intermediate_dim = 2048;
  config.device_scratch_capacity_factor = 64.0;
  const MemoryPlan plan = plan_memory(config, 64);
  EXPECT_EQ(plan.total_scratch_rows, 6'400'000);  // one expert a rank
  const auto staging =
      std::max_element(plan.communication_buffers.begin(), plan.communication_buffers.end(),
                       [](const PlanBuffer& a, const PlanBuffer& b) { return a.bytes < b.bytes; });
  ASSERT_NE(staging, plan.communication_buffers.end());
  EXPECT_EQ(staging->bytes, 6'400'000LL * 7168 * 2);
  EXPECT_GT(staging->bytes, 4 * kGiB);
}

TEST(MemoryPlan, OverflowIsAnErrorAndNotAWrap) {
  const std::int64_t huge = std::int64_t{1} << 61;
  const auto expect_overflow = [](const Config& config, int ep_size) {
    expect_error(
        ErrorCode::kInvalidArgument, [&] { plan_memory(config, ep_size); }, "64 bits");
  };
  Config config = small_config();
  config.hidden_dim = huge;
  expect_overflow(config, 1);
  config = small_config();
  config.intermediate_dim = std::numeric_limits<std::int64_t>::max();
  expect_overflow(config, 3);
  config = small_config();
  config.max_moe_layers_per_activation_slot = huge;
  expect_overflow(config, 3);
  config = small_config();
  config.num_activation_slots = huge;
  expect_overflow(config, 3);
  config = routed_config(2147483647, 2147483647, 2147483647);
  config.distinct_experts = false;
  expect_overflow(config, std::numeric_limits<int>::max());
  config = small_config();
  config.activation_slot_bytes = std::numeric_limits<std::int64_t>::max();
  expect_overflow(config, 3);
  config = small_config();
  config.activation_slot_capacity_factor = 1e300;
  expect_overflow(config, 3);
}

TEST(MemoryPlan, PlansCompareByValue) {
  const MemoryPlan plan = plan_memory(large_config(), 16);
  EXPECT_EQ(plan, plan_memory(large_config(), 16));
  MemoryPlan renamed = plan;
  renamed.metadata_buffers.back().name += "!";
  EXPECT_NE(plan, renamed);
  EXPECT_NE(plan, plan_memory(large_config(), 15));
}

TEST(MemoryPlan, SaysWhatItWasMadeFor) {
  const PlanTarget cpu{BackendKind::kCpu, 3};
  EXPECT_EQ(plan_memory(small_config(), 2, cpu).target, cpu);
  const MemoryPlan cuda = plan_memory(small_config(), 2, {BackendKind::kCuda, 1});
  EXPECT_EQ(cuda.target.backend, BackendKind::kCuda);
  EXPECT_EQ(cuda, plan_memory(small_config(), 2, {BackendKind::kCuda, 9}));
  MemoryPlan other = cuda;
  other.target.backend = BackendKind::kCpu;
  EXPECT_NE(cuda, other);
  expect_error(
      ErrorCode::kInvalidArgument,
      [] {
        plan_memory(small_config(), 2, {static_cast<BackendKind>(7), 1});
      },
      "backend is 7", "cpu, cuda");
}

/// All of a plan in sections, in order: slots, host scratch, device scratch and the rest.
void expect_sections(const MemoryPlan& plan, std::int64_t granularity) {
  SCOPED_TRACE(granularity);
  const PhysicalSections sections = physical_sections(plan, granularity);
  const std::int64_t planned = plan.allocated_bytes - plan.communication_bytes;
  EXPECT_EQ(sections.granularity_bytes, granularity);
  for (const std::int64_t bytes :
       {sections.device_prefix_bytes, sections.host_bytes, sections.device_hot_bytes}) {
    EXPECT_GE(bytes, 0);
    EXPECT_EQ(bytes % granularity, 0);
  }
  EXPECT_EQ(sections.device_prefix_bytes + sections.host_bytes + sections.device_hot_bytes,
            planned + sections.padding_bytes);
  EXPECT_GE(sections.padding_bytes, 0);
  EXPECT_LT(sections.padding_bytes, granularity);
  // Host pages hold host scratch alone, and all of it but for what they share with neighbours.
  EXPECT_LE(sections.host_bytes, plan.host_scratch_bytes);
  EXPECT_GE(sections.host_bytes, plan.host_scratch_bytes - 2 * granularity + 2);
  if (sections.host_bytes == 0) return;
  EXPECT_GE(sections.device_prefix_bytes, plan.total_activation_bytes);
  EXPECT_LE(sections.device_prefix_bytes + sections.host_bytes,
            plan.total_activation_bytes + plan.host_scratch_bytes);
}

TEST(PhysicalSections, CoverThePlanInOrder) {
  for (const bool has_host : {false, true}) {
    for (const Config& base : {small_config(), large_config()}) {
      Config config = base;
      config.device_scratch_capacity_factor = 1.5;
      config.host_scratch.reset();
      if (has_host) config.host_scratch = HostScratch{};
      for (const int ranks : {1, 2, 16}) {
        const MemoryPlan plan = plan_memory(config, ranks, {BackendKind::kCuda, 1});
        for (const std::int64_t granularity : {1, 128, 4096, 2 << 20, 1 << 30}) {
          expect_sections(plan, granularity);
        }
      }
    }
  }
}

TEST(PhysicalSections, RefuseAGranularityOfNothing) {
  const MemoryPlan plan = plan_memory(small_config(), 2);
  for (const std::int64_t granularity : {0, -1}) {
    expect_error(
        ErrorCode::kInvalidArgument, [&] { physical_sections(plan, granularity); },
        "granularity_bytes is " + std::to_string(granularity), "1 or more");
  }
}

}  // namespace
}  // namespace distmoe
