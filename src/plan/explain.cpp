// SPDX-License-Identifier: Apache-2.0
//
// The memory plan in words, read top to bottom: what it is for, each region, totals, warnings.
#include <algorithm>
#include <cmath>
#include <sstream>

#include "core/current_error.hpp"
#include "distmoe/memory_plan.hpp"
#include "plan/byte_text.hpp"
#include "plan/layer_bytes.hpp"
#include "plan/option_names.hpp"

namespace distmoe {
namespace {

constexpr const char* kIndent = "    ";

std::string bytes_text(std::int64_t bytes) { return exact_and_human_bytes(bytes); }

void write_head(std::ostream& text, const Config& config, const MemoryPlan& plan) {
  text << "memory plan of one rank: " << option_name(plan.target.backend) << ", "
       << option_name(config.precision) << (config.inference ? " inference" : " training");
  if (!config.inference) {
    text << ", " << option_name(config.activation_policy) << " activation policy";
  }
  text << ", combine " << option_name(config.combine) << "\n"
       << kIndent << "T <= " << config.max_tokens
       << " tokens of a rank in a call (hard limit: more tokens are refused, with both numbers)\n"
       << kIndent << "K=" << config.top_k << " D=" << config.hidden_dim
       << " F=" << config.intermediate_dim << " E=" << config.num_experts << "; "
       << grouped(plan.balanced_rows) << " rows at balanced routing\n";
}

/// Layers of a slot that balanced routing saves: layer i is saved while the inputs of the layers
/// after it still fit, and each saved layer takes the same bytes.
std::int64_t saved_layers_at_balance(const Config& config, const MemoryPlan& plan) {
  const std::int64_t layers = config.max_moe_layers_per_activation_slot;
  const std::int64_t inputs = layers * plan.saved_input_bytes_per_layer;
  const std::int64_t extra = plan.saved_bytes_per_layer_balanced - plan.saved_input_bytes_per_layer;
  return std::min(layers, (plan.slot_bytes - inputs) / extra);
}

void write_slots(std::ostream& text, const Config& config, const MemoryPlan& plan) {
  if (config.inference) {
    text << "activation slots: 0 slot(s), 0 B\n"
         << kIndent << "scratch-only inference; no saved activations\n";
    return;
  }
  const std::int64_t layers = config.max_moe_layers_per_activation_slot;
  const std::int64_t saved = saved_layers_at_balance(config, plan);
  text << "activation slots: " << plan.num_slots << " slot(s) of " << bytes_text(plan.slot_bytes)
       << " across " << layers << " layer(s) each; in all "
       << bytes_text(plan.total_activation_bytes) << "\n"
       << kIndent << "soft limit: a layer that does not fit keeps its input ("
       << bytes_text(plan.saved_input_bytes_per_layer)
       << " at most) and is computed again in backward, with the same bits\n"
       << kIndent << "minimum " << bytes_text(plan.minimum_slot_bytes)
       << ": every layer is recomputed\n"
       << kIndent << "balanced " << bytes_text(plan.balanced_slot_bytes)
       << ": balanced routing saves every layer\n"
       << kIndent << "maximum useful " << bytes_text(plan.max_useful_slot_bytes)
       << ": no routing within the plan needs more\n"
       << kIndent << "at balanced routing the selected slot saves " << saved << " of " << layers
       << " layer(s), " << bytes_text(plan.saved_bytes_per_layer_balanced)
       << " each, and recomputes " << layers - saved << "\n";
}

/// Where a GPU has what a plan with host scratch says.
void write_physical_sections(std::ostream& text, const MemoryPlan& plan) {
  if (plan.target.backend != BackendKind::kCuda || plan.host_scratch_bytes == 0) return;
  constexpr std::int64_t kNvidiaPieces = std::int64_t{2} << 20;
  const PhysicalSections sections = physical_sections(plan, kNvidiaPieces);
  text << kIndent << "on a GPU, in pieces of 2 MiB: "
       << bytes_text(sections.device_prefix_bytes + sections.device_hot_bytes)
       << " of its memory and " << bytes_text(sections.host_bytes)
       << " of the host's, pinned; the communication buffers come on top\n";
}

void write_scratch(std::ostream& text, const Config& config, const MemoryPlan& plan) {
  const char* padded = is_block_scaled(config.precision)
                           ? " rows (every expert padded to a multiple of 128)"
                           : " rows";
  const char* exceeded =
      "hard limit: more rows are capacity_exceeded on every rank, with the rows needed and "
      "available; no output is written and the next call works\n";
  text << "device scratch: " << bytes_text(plan.device_scratch_bytes) << " for "
       << grouped(plan.device_scratch_rows) << padded << ", factor " << plan.device_scratch_factor
       << "\n"
       << kIndent;
  // NOTE: rows decide, not bytes: scratch of more rows may round to no more bytes.
  const bool has_more_rows = plan.total_scratch_rows > plan.device_scratch_rows;
  if (!has_more_rows) {
    text << exceeded;
  } else if (plan.host_scratch_bytes > 0) {
    text << "soft limit: more rows use host overflow scratch, slower, with the same bits\n";
  } else {
    text << "soft limit: more rows fit in what rounding leaves of it\n";
  }
  text << "host overflow scratch: " << bytes_text(plan.host_scratch_bytes);
  if (has_more_rows) {
    text << " for " << grouped(plan.total_scratch_rows) << padded << " with device scratch, factor "
         << plan.total_scratch_factor << "\n"
         << kIndent << exceeded;
    write_physical_sections(text, plan);
  } else {
    text << "\n" << kIndent << "none: device scratch is the whole capacity\n";
  }
}

const char* control_limit(const Config& config, const MemoryPlan& plan) {
  if (plan.target.backend == BackendKind::kCuda) {
    return config.inference
               ? "grows with the ranks, the experts of a rank and max_tokens"
               : "grows with the ranks, the experts of a rank and max_tokens, and with "
                 "slots x layers: records of what each slot keeps";
  }
  return config.inference
             ? "fixed by the number of ranks"
             : "grows with the ranks, and with slots x layers: records of what each slot keeps";
}

const char* workspace_limit(const MemoryPlan& plan) {
  return plan.target.backend == BackendKind::kCuda
             ? "counts of the routing of one call"
             : "bounded tiles of the matrix library and of format conversions";
}

void write_buffers(std::ostream& text, const char* title, std::int64_t bytes,
                   const std::vector<PlanBuffer>& buffers, const char* limit) {
  text << title << ": " << bytes_text(bytes) << "\n" << kIndent << limit << "\n";
  for (const PlanBuffer& buffer : buffers) {
    text << kIndent << buffer.name << " " << bytes_text(buffer.bytes) << "\n";
  }
}

void write_totals(std::ostream& text, const MemoryPlan& plan) {
  text << "total device (slots and device scratch): " << bytes_text(plan.total_device_bytes) << "\n"
       << "total virtual (and host overflow scratch): " << bytes_text(plan.total_virtual_bytes)
       << "\n"
       << "allocated (all of the above): " << bytes_text(plan.allocated_bytes) << "\n"
       << kIndent << "the sizes are those of backend " << option_name(plan.target.backend)
       << "; communication, metadata, control and workspace differ between backends\n";
}

/// Rows of the whole capacity, padding left out.
double planned_rows(const MemoryPlan& plan) {
  return std::floor(static_cast<double>(plan.balanced_rows) * plan.total_scratch_factor + 0.5);
}

void write_row_warnings(std::ostream& text, const MemoryPlan& plan) {
  const double rows = planned_rows(plan);
  if (rows == 0.0) {
    text << "warning: the scratch factor " << plan.total_scratch_factor
         << " plans 0 rows: any call in which a rank receives a row is capacity_exceeded\n";
  } else if (rows < static_cast<double>(plan.balanced_rows)) {
    text << "warning: the scratch factor " << plan.total_scratch_factor << " plans "
         << grouped(static_cast<std::int64_t>(rows)) << " rows, fewer than the "
         << grouped(plan.balanced_rows)
         << " of balanced routing: a full call at balanced routing is capacity_exceeded\n";
  }
}

void write_warnings(std::ostream& text, const Config& config, const MemoryPlan& plan) {
  const auto capped = [&](const char* name, double asked, double planned) {
    if (asked > planned) {
      text << "warning: " << name << " " << asked << " is capped at the number of ranks, "
           << planned << "; no rank can receive more\n";
    }
  };
  capped("device_scratch_capacity_factor", config.device_scratch_capacity_factor,
         plan.device_scratch_factor);
  if (config.host_scratch) {
    capped("total_scratch_capacity_factor", config.host_scratch->total_scratch_capacity_factor,
           plan.total_scratch_factor);
    if (plan.host_scratch_bytes == 0) {
      text << "warning: host_scratch is configured but plans no bytes: the device scratch already "
              "covers its rows\n";
    }
  }
  write_row_warnings(text, plan);
  if (plan.slot_bytes > plan.max_useful_slot_bytes) {
    text << "warning: the selected slot of " << bytes_text(plan.slot_bytes)
         << " is above the maximum useful " << bytes_text(plan.max_useful_slot_bytes)
         << "; the rest is never used\n";
  }
  if (config.pipeline == Pipeline::kMega && !is_block_scaled(config.precision)) {
    text << "note: pipeline mega is accepted and has no effect for "
         << option_name(config.precision) << "\n";
  }
}

void write_suggestion(std::ostream& text, const char* what, const std::string& value) {
  text << kIndent << "largest " << what << " that fits, all else equal: " << value << "\n";
}

std::string text_of(const Config& config, const MemoryPlan& plan) {
  std::ostringstream text;
  write_head(text, config, plan);
  write_slots(text, config, plan);
  write_scratch(text, config, plan);
  write_buffers(text, "communication", plan.communication_bytes, plan.communication_buffers,
                plan.communication_buffers.empty() ? "none: a single rank has no peers"
                                                   : "sized for any call within the limits above");
  write_buffers(text, "metadata", plan.metadata_bytes, plan.metadata_buffers,
                config.inference ? "routing of one call"
                                 : "routing of one forward-only call and of every saved call");
  write_buffers(text, "control", plan.control_bytes, plan.control_buffers,
                control_limit(config, plan));
  write_buffers(text, "workspace", plan.workspace_bytes, plan.workspace_buffers,
                workspace_limit(plan));
  write_totals(text, plan);
  write_warnings(text, config, plan);
  return text.str();
}

std::string text_of(const BudgetReport& report) {
  std::ostringstream text;
  text << "budget: " << bytes_text(report.budget_bytes) << "; the plan needs "
       << bytes_text(report.needed_bytes);
  if (report.fits) {
    text << " and fits, " << bytes_text(report.budget_bytes - report.needed_bytes) << " left\n";
  } else {
    text << " and does not fit, " << bytes_text(report.needed_bytes - report.budget_bytes)
         << " short\n";
  }
  const auto count = [](const std::optional<std::int64_t>& value) {
    return value ? grouped(*value) : std::string("none");
  };
  write_suggestion(text, "max_tokens", count(report.largest_max_tokens));
  write_suggestion(text, "number of activation slots", count(report.largest_num_slots));
  std::ostringstream factor;
  factor.precision(17);
  if (report.largest_scratch_factor) {
    factor << *report.largest_scratch_factor;
  } else {
    factor << "none";
  }
  write_suggestion(
      text,
      report.factor_is_total ? "total scratch capacity factor" : "device scratch capacity factor",
      factor.str());
  return text.str();
}

}  // namespace

std::string explain(const Config& config, const MemoryPlan& plan) {
  return only_errors("explaining a plan", [&] { return text_of(config, plan); });
}

std::string explain(const BudgetReport& report) {
  return only_errors("explaining a budget", [&] { return text_of(report); });
}

}  // namespace distmoe
