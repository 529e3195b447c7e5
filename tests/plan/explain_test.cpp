// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the text names every region with its exact bytes, says what happens past each limit
// and what the selected slot saves, and warns about settings that have no effect.
#include <gtest/gtest.h>

#include <string>

#include "distmoe/memory_plan.hpp"
#include "plan/byte_text.hpp"
#include "plan/plan_testing.hpp"

namespace distmoe {
namespace {

std::string text_of(const Config& config, int ep_size) {
  return explain(config, plan_memory(config, ep_size));
}

void expect_has(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in:\n" << text;
}

void expect_lacks(const std::string& text, const std::string& part) {
  EXPECT_EQ(text.find(part), std::string::npos) << "'" << part << "' is in:\n" << text;
}

TEST(ByteText, GroupsDigitsAndPicksTheUnit) {
  EXPECT_EQ(grouped(0), "0");
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(grouped(1000), "1,000");
  EXPECT_EQ(grouped(-1234567), "-1,234,567");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1024), "1.00 KiB");
  EXPECT_EQ(human_bytes(1048575), "1.00 MiB");
  EXPECT_EQ(human_bytes(7449083904), "6.94 GiB");
  EXPECT_EQ(exact_and_human_bytes(1073741824), "1,073,741,824 B (1.00 GiB)");
  EXPECT_EQ(exact_and_human_bytes(128), "128 B");
}

TEST(Explain, NamesEveryRegionInExactAndHumanUnits) {
  Config config = small_config();
  config.host_scratch = HostScratch{};
  const MemoryPlan plan = plan_memory(config, 4);
  const std::string text = explain(config, plan);
  for (const std::int64_t bytes :
       {plan.slot_bytes, plan.minimum_slot_bytes, plan.balanced_slot_bytes,
        plan.max_useful_slot_bytes, plan.device_scratch_bytes, plan.host_scratch_bytes,
        plan.communication_bytes, plan.metadata_bytes, plan.control_bytes, plan.workspace_bytes,
        plan.total_device_bytes, plan.total_virtual_bytes, plan.allocated_bytes}) {
    expect_has(text, exact_and_human_bytes(bytes));
  }
  for (const auto* buffers : {&plan.communication_buffers, &plan.metadata_buffers,
                              &plan.control_buffers, &plan.workspace_buffers}) {
    for (const PlanBuffer& buffer : *buffers) {
      expect_has(text, buffer.name + " " + exact_and_human_bytes(buffer.bytes));
    }
  }
}

TEST(Explain, SaysWhichLimitIsSoftAndWhichIsHard) {
  Config config = small_config();
  std::string text = text_of(config, 4);
  expect_has(text, "soft limit: a layer that does not fit keeps its input");
  expect_has(text, "hard limit: more rows are capacity_exceeded");
  expect_lacks(text, "use host overflow scratch");
  config.host_scratch = HostScratch{};
  text = text_of(config, 4);
  expect_has(text, "soft limit: more rows use host overflow scratch");
  expect_has(text, "hard limit: more rows are capacity_exceeded");
}

TEST(Explain, NamesTheTokenLimit) {  // reports: A99
  Config config = small_config();
  config.max_tokens = 8;
  expect_has(text_of(config, 2), "T <= 8 tokens of a rank in a call (hard limit");
}

TEST(Explain, CountsWhatTheSlotSavesAtBalancedRouting) {
  Config config = small_config();
  config.max_moe_layers_per_activation_slot = 10;
  expect_has(text_of(config, 4), "saves 0 of 10 layer(s)");
  config.activation_slot_capacity_factor = 1.0;
  expect_has(text_of(config, 4), "saves 10 of 10 layer(s)");
  config.activation_slot_capacity_factor = 0.5;
  expect_has(text_of(config, 4), "saves 5 of 10 layer(s)");
  expect_has(text_of(config, 4), "and recomputes 5");
  config.activation_slot_capacity_factor = 0.499;
  expect_has(text_of(config, 4), "saves 4 of 10 layer(s)");
}

TEST(Explain, DescribesInferenceAsScratchOnly) {
  Config config = small_config();
  config.inference = true;
  const std::string text = text_of(config, 4);
  expect_has(text, "activation slots: 0 slot(s)");
  expect_has(text, "scratch-only inference; no saved activations");
  expect_lacks(text, "across");
}

TEST(Explain, WarnsAboutSettingsWithoutEffect) {
  Config config = small_config();
  config.device_scratch_capacity_factor = 1.0;
  expect_lacks(text_of(config, 4), "warning");
  expect_lacks(text_of(config, 4), "note");
  config.device_scratch_capacity_factor = 6.5;
  expect_has(text_of(config, 4),
             "device_scratch_capacity_factor 6.5 is capped at the number of "
             "ranks, 4");
  config.host_scratch = HostScratch{};
  expect_has(text_of(config, 4), "total_scratch_capacity_factor 16 is capped");
  expect_has(text_of(config, 4), "host_scratch is configured but plans no bytes");
  config.activation_slot_capacity_factor = 50.0;
  expect_has(text_of(config, 4), "above the maximum useful");
  config.pipeline = Pipeline::kMega;
  expect_has(text_of(config, 4), "pipeline mega is accepted and has no effect for bf16");
  config.precision = Precision::kMXFP8;
  expect_lacks(text_of(config, 4), "no effect");
}

TEST(Explain, ShowsTheFormOfTheCombine) {  // reports: A104
  Config config = small_config();
  expect_has(text_of(config, 2), "bf16 training, full activation policy, combine per_route");
}

TEST(Explain, NamesTheBackendOfThePlan) {
  const Config config = small_config();
  expect_has(text_of(config, 2), "memory plan of one rank: cpu, bf16 training");
  const std::string cuda = explain(config, plan_memory(config, 2, {BackendKind::kCuda, 1}));
  expect_has(cuda, "memory plan of one rank: cuda, bf16 training");
  expect_has(cuda, "combine window");
  expect_lacks(cuda, "matrix library");
}

TEST(Explain, WarnsWhereBalancedRoutingExceedsTheCapacity) {
  Config config = small_config();  // 192 rows at balanced routing
  config.device_scratch_capacity_factor = 0.5;
  expect_has(text_of(config, 4),
             "warning: the scratch factor 0.5 plans 96 rows, fewer than the 192");
  expect_has(text_of(config, 4), "at balanced routing is capacity_exceeded");
  config.host_scratch = HostScratch{1.0, true};
  expect_lacks(text_of(config, 4), "fewer than");
  config.host_scratch.reset();
  config.precision = Precision::kMXFP8;  // padding of experts is no room for more rows
  expect_has(text_of(config, 4), "fewer than the 192");
}

TEST(Explain, WarnsWhereAFactorPlansNoRow) {
  Config config = small_config();
  config.device_scratch_capacity_factor = 1e-9;
  expect_has(text_of(config, 4), "warning: the scratch factor 1e-09 plans 0 rows");
  expect_lacks(text_of(config, 4), "fewer than");
  config.device_scratch_capacity_factor = 0.5 / 192;
  expect_has(text_of(config, 4), "plans 1 rows, fewer than the 192");
}

TEST(Explain, SaysWhereAGpuHasHostScratch) {
  Config config = small_config();
  config.max_tokens = 1 << 20;
  config.device_scratch_capacity_factor = 1.5;
  config.host_scratch = HostScratch{};
  const auto text_on = [&](BackendKind backend) {
    return explain(config, plan_memory(config, 16, {backend, 1}));
  };
  expect_has(text_on(BackendKind::kCuda), "on a GPU, in pieces of 2 MiB: ");
  expect_has(text_on(BackendKind::kCuda), "of the host's, pinned");
  expect_lacks(text_on(BackendKind::kCpu), "on a GPU");
  config.host_scratch.reset();
  expect_lacks(text_on(BackendKind::kCuda), "on a GPU");
}

TEST(Explain, TakesTheLimitFromRowsWhereBytesOfHostScratchRoundToNone) {
  Config config = small_config();
  config.max_tokens = 160;
  config.hidden_dim = config.intermediate_dim = config.top_k = 1;
  config.num_experts = 4;
  config.device_scratch_capacity_factor = 1.0;
  config.host_scratch = HostScratch{1.2, true};
  const MemoryPlan plan = plan_memory(config, 4);
  ASSERT_EQ(plan.host_scratch_bytes, 0);
  ASSERT_EQ(plan.device_scratch_rows, 160);
  ASSERT_EQ(plan.total_scratch_rows, 192);
  const std::string text = explain(config, plan);
  expect_has(text, "for 160 rows, factor 1\n    soft limit: more rows fit in what rounding leaves");
  expect_has(text,
             "host overflow scratch: 0 B for 192 rows with device scratch, factor 1.2\n"
             "    hard limit: more rows");
  expect_lacks(text, "device scratch is the whole capacity");
}

TEST(Explain, SaysWhatControlMemoryGrowsWith) {
  Config config = small_config();
  expect_has(text_of(config, 2), "grows with the ranks, and with slots x layers");
  expect_lacks(text_of(config, 2), "fixed by the number of ranks");
  config.inference = true;
  expect_has(text_of(config, 2), "fixed by the number of ranks");
  const std::string cuda = explain(config, plan_memory(config, 2, {BackendKind::kCuda, 1}));
  expect_has(cuda, "grows with the ranks, the experts of a rank and max_tokens\n");
}

}  // namespace
}  // namespace distmoe
