// SPDX-License-Identifier: Apache-2.0
//
// Invariant: for any plan, the regions that a context hands out (slots with the layers in them,
// scratch of a call, every named buffer) are aligned, disjoint and inside the allocation, which is
// as large as the plan says: what is written at the edges of one is never found in another.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "backend/cpu/context_memory.hpp"
#include "core/check.hpp"
#include "layout/context_buffers.hpp"
#include "plan/layer_bytes.hpp"
#include "plan/plan_testing.hpp"
#include "plan/rank_slots.hpp"
#include "plan/scratch_layout.hpp"

namespace distmoe {
namespace {

constexpr std::size_t kEdge = 16;

class Random {
 public:
  std::int64_t pick(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(engine_);
  }

  Config config() {
    Config config;
    config.max_tokens = pick(1, 40);
    config.num_experts = pick(1, 12);
    config.top_k = pick(1, config.num_experts);
    config.inference = pick(0, 3) == 0;
    const Precision precisions[] = {Precision::kBF16, Precision::kMXFP8, Precision::kMXFP4,
                                    Precision::kNVFP4};
    config.precision = precisions[pick(0, 3)];
    if (config.precision == Precision::kMXFP4 || config.precision == Precision::kNVFP4) {
      config.inference = true;
    }
    config.pipeline = pick(0, 1) == 0 ? Pipeline::kStaged : Pipeline::kMega;
    const std::int64_t unit = config.precision == Precision::kBF16 ? 1 : 32;
    config.hidden_dim = unit * pick(1, 64 / unit);
    config.intermediate_dim = unit * pick(1, 64 / unit);
    config.max_moe_layers_per_activation_slot = pick(1, 4);
    config.num_activation_slots = pick(1, 3);
    config.device_scratch_capacity_factor = static_cast<double>(pick(1, 30)) / 10;
    config.distinct_experts = pick(0, 1) == 0;
    config.combine = pick(0, 1) == 0 ? Combine::kPerRoute : Combine::kPerRank;
    if (pick(0, 2) == 0) config.host_scratch = HostScratch{};
    if (!config.inference)
      config.activation_slot_capacity_factor = static_cast<double>(pick(0, 20)) / 10;
    // Exact bytes, over the minimum of the largest shape drawn here.
    if (!config.inference && pick(0, 2) == 0) {
      config.activation_slot_capacity_factor.reset();
      config.activation_slot_bytes = pick(4 * 40 * 64 * 2 + 512, 400000);
    }
    if (!config.inference && config.precision == Precision::kBF16 && pick(0, 1) == 0) {
      config.activation_policy = ActivationPolicy::kLean;
    }
    return config;
  }

 private:
  std::mt19937_64 engine_{330};
};

/// Regions of one context, each with canaries of its own at both ends.
class Regions {
 public:
  Regions(std::byte* base, std::int64_t end) : base_(base), end_(end) {}

  void add(const std::string& name, std::int64_t offset, std::int64_t bytes) {
    if (bytes == 0) return;
    regions_.push_back({offset, bytes, name});
  }

  void check() {
    std::ranges::sort(regions_, {}, &Region::offset);
    std::int64_t free_from = 0;
    for (const Region& region : regions_) {
      EXPECT_EQ(region.offset % 128, 0) << region.name;
      EXPECT_GE(region.offset, free_from) << region.name << " overlaps what is before it";
      free_from = region.offset + region.bytes;
      EXPECT_LE(free_from, end_) << region.name;
    }
    if (testing::Test::HasFailure()) return;
    for (std::size_t i = 0; i < regions_.size(); ++i) visit_edges(i, true);
    for (std::size_t i = 0; i < regions_.size(); ++i) visit_edges(i, false);
  }

 private:
  struct Region {
    std::int64_t offset;
    std::int64_t bytes;
    std::string name;
  };

  void visit_edges(std::size_t index, bool writes) {
    const Region& region = regions_[index];
    const auto canary = static_cast<std::byte>(index + 1);
    const auto edge = std::min(kEdge, static_cast<std::size_t>(region.bytes));
    std::byte* first = base_ + region.offset;
    for (std::byte* at : {first, first + region.bytes - edge}) {
      if (writes) {
        std::fill_n(at, edge, canary);
      } else {
        EXPECT_EQ(std::count(at, at + edge, canary), static_cast<std::ptrdiff_t>(edge))
            << region.name;
      }
    }
  }

  std::byte* base_;
  std::int64_t end_;
  std::vector<Region> regions_;
};

void add_offsets(Regions& regions, const std::string& name, const RegionOffsets& offsets,
                 const LayerRegions& sizes) {
  const auto add = [&](const char* part, std::int64_t offset, std::int64_t bytes) {
    if (offset != kNoRegion) regions.add(name + part, offset, bytes);
  };
  add("quantised rows", offsets.quantised_rows, sizes.quantised_rows);
  add("x", offsets.x, sizes.x);
  add("h1", offsets.h1, sizes.h1);
  // In BF16 training h2 and grad_h3 lie over grad_h1 on purpose.
  if (offsets.h2 != offsets.grad_h1) {
    add("h2", offsets.h2, sizes.h2);
    add("grad_h3", offsets.grad_h3, sizes.grad_h3);
  }
  add("h3", offsets.h3, sizes.h3);
  add("grad_h1", offsets.grad_h1, sizes.grad_h1);
  add("grad_h2", offsets.grad_h2, sizes.grad_h2);
}

void check_plan(const Config& config, int ep_size, Random& random) {
  const MemoryPlan plan = plan_memory(config, ep_size);
  const cpu::ContextMemory memory(plan);
  EXPECT_EQ(memory.allocated_bytes(), plan.allocated_bytes);
  std::byte* base = memory.activations().data();
  Regions regions(base, plan.allocated_bytes);
  for (const auto* list : {&plan.communication_buffers, &plan.metadata_buffers,
                           &plan.control_buffers, &plan.workspace_buffers}) {
    for (const PlanBuffer& buffer : *list) {
      const std::span<std::byte> bytes = memory.buffer(buffer.name);
      EXPECT_EQ(std::ssize(bytes), buffer.bytes);
      regions.add(buffer.name, bytes.data() - base, buffer.bytes);
    }
  }
  const LayerDims dims = layer_dims(config);
  const LayerBytes<> layer{dims};
  const std::int64_t rows = random.pick(0, plan.total_scratch_rows);
  add_offsets(regions, "scratch ", scratch_layout(dims, rows, plan.total_virtual_bytes),
              layer.scratch_regions(rows));
  if (!config.inference) {
    RankSlots slots(config, plan, ep_size, 0);
    const auto ranks = static_cast<std::size_t>(ep_size);
    for (std::int64_t slot = 0; slot < plan.num_slots; ++slot) {
      slots.select(slot, config.max_moe_layers_per_activation_slot);
      for (std::int64_t i = 0; i < config.max_moe_layers_per_activation_slot; ++i) {
        std::vector<std::int64_t> tokens(ranks);
        std::vector<std::int64_t> received(ranks);
        for (auto& value : tokens) value = random.pick(0, config.max_tokens);
        for (auto& value : received) value = random.pick(0, plan.total_scratch_rows);
        const SavedLayer saved = slots.push(tokens, received).saved;
        const std::int64_t begin = slots.slot_offset(slot) + saved.offset;
        const std::string name = concat("slot ", slot, " layer ", i, " ");
        EXPECT_LE(saved.offset + saved.bytes, plan.slot_bytes) << name;
        if (saved.is_recomputed) {
          regions.add(name + "x", begin, layer.input(tokens[0]));
        } else {
          add_offsets(regions, name, saved_layout(dims, tokens[0], received[0], begin),
                      layer.saved_regions(tokens[0], received[0]));
        }
      }
    }
  }
  regions.check();
}

TEST(RegionCanaries, LiveInTenThousandRandomPlans) {
  Random random;
  int checked = 0;
  while (checked < 10000 && !testing::Test::HasFailure()) {
    const Config config = random.config();
    const auto ep_size = static_cast<int>(random.pick(1, 6));
    std::string plan_text;
    try {
      plan_text = explain(config, plan_memory(config, ep_size));
    } catch (const Error& error) {
      // Drawn illegal, by these rules alone.
      const std::string message = error.what();
      ASSERT_TRUE(message.find("total_scratch_capacity_factor") != std::string::npos) << message;
      continue;
    }
    SCOPED_TRACE(plan_text);
    check_plan(config, ep_size, random);
    ++checked;
  }
}

}  // namespace
}  // namespace distmoe
