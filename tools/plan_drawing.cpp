// SPDX-License-Identifier: Apache-2.0
#include "plan_drawing.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "core/check.hpp"
#include "number_text.hpp"
#include "plan/byte_text.hpp"
#include "plan/option_names.hpp"
#include "svg_writer.hpp"

namespace distmoe::tools {
namespace {

constexpr double kWidth = 1000.0;
constexpr double kHeight = 800.0;
constexpr double kLeft = 40.0;
constexpr double kRight = 960.0;
constexpr double kBarTop = 118.0;
constexpr double kBarHeight = 54.0;
constexpr double kTableTop = 236.0;
constexpr double kTableStep = 23.0;
constexpr double kPlotLeft = 120.0;
constexpr double kPlotTop = 470.0;
constexpr double kPlotBottom = 730.0;
constexpr int kSamples = 96;
constexpr const char* kMuted = "#57606a";
constexpr const char* kBudgetColour = "#b42318";
constexpr const char* kMarkColour = "#1b1f24";

/// A region of the drawing, bottom to top and left to right.
struct Region {
  const char* name;
  const char* colour;  // told apart also by the colour-blind (Okabe and Ito)
  const char* text_colour;
  const char* limit;
  std::int64_t bytes;
};

using Regions = std::array<Region, 7>;

const char* control_limit(const MemoryPlan& plan) {
  const bool has_slots = plan.num_slots > 0;
  if (plan.target.backend == BackendKind::kCuda) {
    return has_slots ? "grows with ranks, experts, tokens, slots x layers"
                     : "grows with ranks, experts, tokens";
  }
  return has_slots ? "grows with ranks, slots x layers" : "fixed by the ranks";
}

Regions regions_of(const MemoryPlan& plan) {
  const char* slot_limit = plan.num_slots > 0 ? "soft: what does not fit is recomputed"
                                              : "none: an inference context saves nothing";
  const bool has_host = plan.total_scratch_rows > plan.device_scratch_rows;
  const bool is_cuda = plan.target.backend == BackendKind::kCuda;
  constexpr const char* kHard = "hard: more rows are capacity_exceeded";
  return {{
      {"activation slots", "#0072B2", "#ffffff", slot_limit, plan.total_activation_bytes},
      {"device scratch", "#E69F00", "#1b1f24",
       has_host ? "soft: more rows use host scratch" : kHard, plan.device_scratch_bytes},
      {"host scratch", "#F0E442", "#1b1f24", has_host ? kHard : "none planned",
       plan.host_scratch_bytes},
      {"communication", "#009E73", "#ffffff", "covers every call of the plan",
       plan.communication_bytes},
      {"metadata", "#CC79A7", "#1b1f24", "covers every call of the plan", plan.metadata_bytes},
      {"workspace", "#56B4E9", "#1b1f24", is_cuda ? "counts of one call" : "bounded tiles",
       plan.workspace_bytes},
      {"control", "#7f7f7f", "#ffffff", control_limit(plan), plan.control_bytes},
  }};
}

std::string percent(std::int64_t part, std::int64_t whole) {
  const double share = static_cast<double>(part) / static_cast<double>(whole);
  return part > 0 && share < 0.0005 ? "< 0.1 %" : percent_text(share);
}

/// A round number of units for about `count` steps up to `most` bytes.
double byte_step(double most, int count) {
  const double raw = most / count;
  double unit = 1.0;
  while (unit * 1024.0 <= raw) unit *= 1024.0;
  for (const double steps : {1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0}) {
    if (steps * unit >= raw) return steps * unit;
  }
  return 1024.0 * unit;
}

double token_step(double most, int count) {
  const double raw = std::max(1.0, most / count);
  double step = std::exp2(std::floor(std::log2(raw)));
  if (step < raw) step *= 2.0;
  return step;
}

std::string short_bytes(double bytes) {
  std::string text = human_bytes(static_cast<std::int64_t>(bytes));
  const std::size_t zeros = text.find(".00 ");
  if (zeros != std::string::npos) text.erase(zeros, 3);
  return text;
}

void draw_head(SvgWriter& svg, const PlanDrawing& drawing, const MemoryPlan& plan) {
  const Config& c = drawing.config;
  svg.text({kLeft, 42},
           concat("Memory of one rank", drawing.title.empty() ? "" : ": ", drawing.title),
           {.size = 23.0, .bold = true});
  svg.text({kLeft, 68},
           concat(option_name(plan.target.backend), ", ", option_name(c.precision),
                  c.inference ? " inference" : " training", ", P=", drawing.ep_size,
                  ", T=", c.max_tokens, ", K=", c.top_k, ", D=", c.hidden_dim,
                  ", F=", c.intermediate_dim, ", E=", c.num_experts, "; device factor ",
                  plan.device_scratch_factor, ", total factor ", plan.total_scratch_factor),
           {.size = 14.0, .fill = kMuted});
  if (!c.inference) {
    svg.text({kLeft, 89},
             concat(plan.num_slots, " slot(s) of ", human_bytes(plan.slot_bytes), " for ",
                    c.max_moe_layers_per_activation_slot, " layer(s), ",
                    option_name(c.activation_policy),
                    " policy (all recomputed: ", human_bytes(plan.minimum_slot_bytes),
                    ", balanced routing saved: ", human_bytes(plan.balanced_slot_bytes), ")"),
             {.size = 14.0, .fill = kMuted});
  }
  svg.text({kRight, 42}, concat(human_bytes(plan.allocated_bytes), " allocated"),
           {.size = 23.0, .anchor = "end", .bold = true});
}

void draw_bar(SvgWriter& svg, const PlanDrawing& drawing, const MemoryPlan& plan) {
  const double allocated = static_cast<double>(plan.allocated_bytes);
  const double budget = drawing.budget_bytes ? static_cast<double>(*drawing.budget_bytes) : 0.0;
  const bool shows_budget = drawing.budget_bytes && budget <= 2.0 * allocated;
  const double most = shows_budget ? std::max(allocated, budget) : allocated;
  const double scale = (kRight - kLeft) / most;
  double x = kLeft;
  for (const Region& region : regions_of(plan)) {
    const double width = static_cast<double>(region.bytes) * scale;
    svg.rectangle({x, kBarTop}, width, kBarHeight, region.colour,
                  concat(region.name, ": ", exact_and_human_bytes(region.bytes)));
    if (width > 118.0) {
      svg.text({x + width / 2, kBarTop + 23}, region.name,
               {.anchor = "middle", .fill = region.text_colour, .bold = true});
      svg.text({x + width / 2, kBarTop + 41}, human_bytes(region.bytes),
               {.anchor = "middle", .fill = region.text_colour});
    }
    x += width;
  }
  const double axis = kBarTop + kBarHeight + 4;
  svg.line({kLeft, axis}, {kRight, axis});
  const double step = byte_step(most, 6);
  for (double bytes = 0.0; bytes <= most; bytes += step) {
    const double at = kLeft + bytes * scale;
    svg.line({at, axis}, {at, axis + 5});
    svg.text({at, axis + 20}, short_bytes(bytes),
             {.size = 12.0, .anchor = at > kRight - 20 ? "end" : "middle", .fill = kMuted});
  }
  if (shows_budget) {
    const double at = kLeft + budget * scale;
    svg.line({at, kBarTop - 8}, {at, axis + 5}, {.stroke = kBudgetColour, .width = 2.0});
    svg.text({at, kBarTop - 12}, concat("budget ", short_bytes(budget)),
             {.anchor = at > kWidth / 2 ? "end" : "start", .fill = kBudgetColour, .bold = true});
  }
}

void draw_table(SvgWriter& svg, const MemoryPlan& plan) {
  double y = kTableTop;
  for (const Region& region : regions_of(plan)) {
    svg.rectangle({kLeft, y - 12}, 15, 15, region.colour);
    svg.text({kLeft + 24, y}, region.name, {.size = 14.0});
    svg.text({360, y}, grouped(region.bytes) + " B", {.size = 14.0, .anchor = "end"});
    svg.text({470, y}, human_bytes(region.bytes), {.size = 14.0, .anchor = "end", .bold = true});
    svg.text({545, y}, percent(region.bytes, plan.allocated_bytes),
             {.size = 14.0, .anchor = "end", .fill = kMuted});
    svg.text({575, y}, region.limit, {.size = 14.0, .fill = kMuted});
    y += kTableStep;
  }
}

/// Plans of growing max_tokens; ends early where a slot of fixed bytes gets too small or sizes
/// leave 64 bits.
struct Curve {
  std::vector<std::int64_t> tokens;
  std::vector<Regions> regions;
  std::int64_t most_bytes = 1;
};

Curve curve_of(const PlanDrawing& drawing) {
  Curve curve;
  Config config = drawing.config;
  const std::int64_t end = std::min<std::int64_t>(2 * drawing.config.max_tokens,
                                                  std::numeric_limits<std::int32_t>::max());
  for (int i = 1; i <= kSamples; ++i) {
    config.max_tokens = std::max<std::int64_t>(1, end * i / kSamples);
    if (!curve.tokens.empty() && curve.tokens.back() == config.max_tokens) continue;
    try {
      const MemoryPlan plan = plan_memory(config, drawing.ep_size, drawing.target);
      curve.tokens.push_back(config.max_tokens);
      curve.regions.push_back(regions_of(plan));
      curve.most_bytes = std::max(curve.most_bytes, plan.allocated_bytes);
    } catch (const Error&) {
      break;
    }
  }
  return curve;
}

class Plot {
 public:
  Plot(SvgWriter& svg, const PlanDrawing& drawing, const MemoryPlan& plan)
      : svg_(svg),
        drawing_(drawing),
        plan_(plan),
        curve_(curve_of(drawing)),
        most_tokens_(static_cast<double>(2 * drawing.config.max_tokens)),
        most_bytes_(1.08 * static_cast<double>(curve_.most_bytes)) {
    if (drawing.budget_bytes && *drawing.budget_bytes <= 2 * curve_.most_bytes) {
      most_bytes_ = std::max(most_bytes_, 1.08 * static_cast<double>(*drawing.budget_bytes));
    }
  }

  void draw() {
    svg_.text({kLeft, kPlotTop - 34}, "Bytes of one rank against max_tokens",
              {.size = 17.0, .bold = true});
    draw_grid();
    draw_areas();
    draw_budget();
    draw_planned();
  }

 private:
  double x_of(double tokens) const {
    return kPlotLeft + (kRight - kPlotLeft) * tokens / most_tokens_;
  }
  double y_of(double bytes) const {
    return kPlotBottom - (kPlotBottom - kPlotTop) * bytes / most_bytes_;
  }

  void draw_grid() {
    const double step = byte_step(most_bytes_, 5);
    for (double bytes = 0.0; bytes <= most_bytes_; bytes += step) {
      svg_.line({kPlotLeft, y_of(bytes)}, {kRight, y_of(bytes)}, {.stroke = "#d0d7de"});
      svg_.text({kPlotLeft - 10, y_of(bytes) + 4}, short_bytes(bytes),
                {.anchor = "end", .fill = kMuted});
    }
    const double tokens_step = token_step(most_tokens_, 8);
    for (double tokens = 0.0; tokens <= most_tokens_; tokens += tokens_step) {
      svg_.line({x_of(tokens), kPlotBottom}, {x_of(tokens), kPlotBottom + 5});
      svg_.text({x_of(tokens), kPlotBottom + 21}, grouped(static_cast<std::int64_t>(tokens)),
                {.anchor = "middle", .fill = kMuted});
    }
    svg_.text({(kPlotLeft + kRight) / 2, kPlotBottom + 46},
              "max_tokens (tokens of a rank in one call)", {.size = 14.0, .anchor = "middle"});
  }

  void draw_areas() {
    std::vector<double> below(curve_.tokens.size(), 0.0);
    for (std::size_t region = 0; region < std::tuple_size_v<Regions>; ++region) {
      std::vector<Point> outline;
      outline.reserve(2 * below.size());
      for (std::size_t i = 0; i < below.size(); ++i) {
        outline.push_back({x_of(static_cast<double>(curve_.tokens[i])), y_of(below[i])});
      }
      for (std::size_t i = below.size(); i-- > 0;) {
        below[i] += static_cast<double>(curve_.regions[i][region].bytes);
        outline.push_back({x_of(static_cast<double>(curve_.tokens[i])), y_of(below[i])});
      }
      const Region& of_region = curve_.regions.front()[region];
      svg_.polygon(outline, of_region.colour, of_region.name);
    }
  }

  void draw_budget() {
    if (!drawing_.budget_bytes) return;
    const double budget = static_cast<double>(*drawing_.budget_bytes);
    if (budget > most_bytes_) return;
    svg_.line({kPlotLeft, y_of(budget)}, {kRight, y_of(budget)},
              {.stroke = kBudgetColour, .width = 2.0, .dashed = true});
    const BudgetReport report =
        check_budget(drawing_.config, drawing_.ep_size, *drawing_.budget_bytes, drawing_.target);
    std::string words = concat("budget ", short_bytes(budget));
    if (report.largest_max_tokens) {
      words += concat(": up to ", grouped(*report.largest_max_tokens), " tokens");
      const double tokens = static_cast<double>(*report.largest_max_tokens);
      if (tokens <= most_tokens_) svg_.circle({x_of(tokens), y_of(budget)}, 5, kBudgetColour);
    }
    svg_.text({kPlotLeft + 8, y_of(budget) - 7}, words, {.fill = kBudgetColour, .bold = true});
  }

  void draw_planned() {
    const double tokens = static_cast<double>(drawing_.config.max_tokens);
    const double bytes = static_cast<double>(plan_.allocated_bytes);
    svg_.line({x_of(tokens), kPlotBottom}, {x_of(tokens), kPlotTop - 8},
              {.stroke = kMarkColour, .width = 1.5, .dashed = true});
    svg_.circle({x_of(tokens), y_of(bytes)}, 5, kMarkColour);
    svg_.text({x_of(tokens), kPlotTop - 14},
              concat("planned: T = ", grouped(drawing_.config.max_tokens), ", ",
                     human_bytes(plan_.allocated_bytes)),
              {.anchor = "middle", .bold = true});
  }

  SvgWriter& svg_;
  const PlanDrawing& drawing_;
  const MemoryPlan& plan_;
  Curve curve_;
  double most_tokens_;
  double most_bytes_;
};

}  // namespace

std::string svg_of(const PlanDrawing& drawing) {
  const MemoryPlan plan = plan_memory(drawing.config, drawing.ep_size, drawing.target);
  SvgWriter svg(kWidth, kHeight,
                concat("Memory plan of one rank, ", exact_and_human_bytes(plan.allocated_bytes)));
  draw_head(svg, drawing, plan);
  draw_bar(svg, drawing, plan);
  draw_table(svg, plan);
  Plot(svg, drawing, plan).draw();
  return svg.finish();
}

}  // namespace distmoe::tools
