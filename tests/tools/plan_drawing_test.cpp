// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the drawing is well-formed, names every region with its bytes, and the bar is to
// scale.
#include "plan_drawing.hpp"

#include <gtest/gtest.h>

#include <regex>
#include <string>
#include <vector>

#include "plan/byte_text.hpp"
#include "plan/plan_testing.hpp"
#include "svg_writer.hpp"

namespace distmoe::tools {
namespace {

PlanDrawing drawing_of(const Config& config, int ep_size) {
  return {"Some <Model> & \"more\"", config, ep_size, {}, {}};
}

/// Every tag closes, in order, and no attribute or text holds a bare '<' or '&'.
void expect_well_formed(const std::string& svg) {
  std::vector<std::string> open;
  const std::regex tag(
      "<(/?)([a-z]+)((?: [a-z0-9-]+=\"[^\"<]*\"| xmlns=\"[^\"]*\"| viewBox=\"[^\"]*\")*)(/?)>");
  std::size_t position = 0;
  for (std::sregex_iterator it(svg.begin(), svg.end(), tag), end; it != end; ++it) {
    const auto gap = svg.substr(position, static_cast<std::size_t>(it->position()) - position);
    EXPECT_EQ(gap.find('<'), std::string::npos) << gap;
    position = static_cast<std::size_t>(it->position() + it->length());
    if ((*it)[1] == "/") {
      ASSERT_FALSE(open.empty());
      EXPECT_EQ(open.back(), (*it)[2]);
      open.pop_back();
    } else if ((*it)[4] != "/") {
      open.push_back((*it)[2]);
    }
  }
  EXPECT_TRUE(open.empty());
  EXPECT_EQ(svg.substr(position), "\n");
  EXPECT_FALSE(std::regex_search(svg, std::regex("&(?!(amp|lt|gt|quot);)")));
}

TEST(PlanDrawing, IsWellFormedAndNamesEveryRegion) {
  Config config = small_config();
  config.host_scratch = HostScratch{};
  const MemoryPlan plan = plan_memory(config, 4);
  const std::string svg = svg_of(drawing_of(config, 4));
  expect_well_formed(svg);
  EXPECT_NE(svg.find("Some &lt;Model&gt; &amp; &quot;more&quot;"), std::string::npos);
  for (const std::int64_t bytes :
       {plan.total_activation_bytes, plan.device_scratch_bytes, plan.host_scratch_bytes,
        plan.communication_bytes, plan.metadata_bytes, plan.control_bytes, plan.workspace_bytes}) {
    EXPECT_NE(svg.find(">" + grouped(bytes) + " B<"), std::string::npos) << bytes;
  }
  EXPECT_NE(svg.find("planned: T = 64, " + human_bytes(plan.allocated_bytes)), std::string::npos);
  EXPECT_EQ(svg.find("budget"), std::string::npos);
}

TEST(PlanDrawing, BarIsToScale) {
  Config config = small_config();
  config.activation_slot_capacity_factor = 1.0;
  const MemoryPlan plan = plan_memory(config, 4);
  const std::string svg = svg_of(drawing_of(config, 4));
  const std::regex bar("y=\"118.00\" width=\"([0-9.]+)\"[^>]*><title>([a-z ]+): ");
  double sum = 0.0;
  double slots = 0.0;
  for (std::sregex_iterator it(svg.begin(), svg.end(), bar), end; it != end; ++it) {
    sum += std::stod((*it)[1]);
    if ((*it)[2] == "activation slots") slots = std::stod((*it)[1]);
  }
  EXPECT_NEAR(sum, 920.0, 0.1);
  EXPECT_NEAR(
      slots / sum,
      static_cast<double>(plan.total_activation_bytes) / static_cast<double>(plan.allocated_bytes),
      1e-4);
}

TEST(PlanDrawing, MarksTheBudgetAndWhatFitsIt) {
  PlanDrawing drawing = drawing_of(small_config(), 4);
  drawing.budget_bytes = plan_memory(small_config(), 4).allocated_bytes - 1;
  const std::string svg = svg_of(drawing);
  EXPECT_NE(svg.find(": up to 63 tokens"), std::string::npos);
  expect_well_formed(svg);
}

TEST(PlanDrawing, DrawsTheSmallestAndTheFixedSlot) {
  Config config = small_config();
  config.max_tokens = 1;
  expect_well_formed(svg_of(drawing_of(config, 1)));
  config.max_tokens = 64;
  config.activation_slot_bytes = plan_memory(config, 1).minimum_slot_bytes;  // ends at T = 64
  expect_well_formed(svg_of(drawing_of(config, 1)));
  config.activation_slot_bytes.reset();
  config.inference = true;
  EXPECT_NE(svg_of(drawing_of(config, 1)).find("an inference context saves nothing"),
            std::string::npos);
}

TEST(PlanDrawing, NamesTheBackendAndWhatControlGrowsWith) {
  PlanDrawing drawing = drawing_of(small_config(), 4);
  std::string svg = svg_of(drawing);
  EXPECT_NE(svg.find(">cpu, bf16 training"), std::string::npos);
  EXPECT_NE(svg.find(">grows with ranks, slots x layers<"), std::string::npos);
  EXPECT_EQ(svg.find("fixed by the ranks"), std::string::npos);
  drawing.target.backend = BackendKind::kCuda;
  svg = svg_of(drawing);
  EXPECT_NE(svg.find(">cuda, bf16 training"), std::string::npos);
  EXPECT_NE(svg.find(">grows with ranks, experts, tokens, slots x layers<"), std::string::npos);
  drawing.target.backend = BackendKind::kCpu;
  drawing.config.inference = true;
  EXPECT_NE(svg_of(drawing).find(">fixed by the ranks<"), std::string::npos);
}

}  // namespace
}  // namespace distmoe::tools
