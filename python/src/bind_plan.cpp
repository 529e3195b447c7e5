// SPDX-License-Identifier: Apache-2.0
//
// The memory plan, the budget check and the slots of pipeline schedules: pure functions.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "config_argument.hpp"
#include "distmoe/slot_assignment.hpp"
#include "value_class.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace distmoe::python {
namespace {

PlanTarget target_of(const std::string& backend, int num_threads) {
  return {.backend = choice_of<BackendKind>("backend", backend), .num_threads = num_threads};
}

void bind_memory_plan(nb::module_& module) {
  ValueClass<PlanBuffer>(module, "PlanBuffer", "One named buffer of a context.")
      .field("name", &PlanBuffer::name)
      .field("bytes", &PlanBuffer::bytes);
  ValueClass<MemoryPlan>(module, "MemoryPlan",
                         "What one rank allocates, exactly. Sizes in bytes unless they say rows.")
      .field(
          "backend",
          [](const MemoryPlan& self) { return std::string(option_name(self.target.backend)); },
          [](MemoryPlan& self, const std::string& name) {
            self.target.backend = choice_of<BackendKind>("backend", name);
          })
      .field(
          "num_threads", [](const MemoryPlan& self) { return self.target.num_threads; },
          [](MemoryPlan& self, int value) { self.target.num_threads = value; })
      .field("balanced_rows", &MemoryPlan::balanced_rows)
      .field("device_scratch_rows", &MemoryPlan::device_scratch_rows)
      .field("total_scratch_rows", &MemoryPlan::total_scratch_rows)
      .field("device_scratch_factor", &MemoryPlan::device_scratch_factor)
      .field("total_scratch_factor", &MemoryPlan::total_scratch_factor)
      .field("saved_input_bytes_per_layer", &MemoryPlan::saved_input_bytes_per_layer)
      .field("saved_bytes_per_layer_balanced", &MemoryPlan::saved_bytes_per_layer_balanced)
      .field("device_scratch_bytes", &MemoryPlan::device_scratch_bytes)
      .field("host_scratch_bytes", &MemoryPlan::host_scratch_bytes)
      .field("minimum_slot_bytes", &MemoryPlan::minimum_slot_bytes)
      .field("balanced_slot_bytes", &MemoryPlan::balanced_slot_bytes)
      .field("max_useful_slot_bytes", &MemoryPlan::max_useful_slot_bytes)
      .field("slot_bytes", &MemoryPlan::slot_bytes)
      .field("num_slots", &MemoryPlan::num_slots)
      .field("total_activation_bytes", &MemoryPlan::total_activation_bytes)
      .field("total_device_bytes", &MemoryPlan::total_device_bytes)
      .field("total_virtual_bytes", &MemoryPlan::total_virtual_bytes)
      .field("communication_buffers", &MemoryPlan::communication_buffers)
      .field("metadata_buffers", &MemoryPlan::metadata_buffers)
      .field("control_buffers", &MemoryPlan::control_buffers)
      .field("workspace_buffers", &MemoryPlan::workspace_buffers)
      .field("communication_bytes", &MemoryPlan::communication_bytes)
      .field("metadata_bytes", &MemoryPlan::metadata_bytes)
      .field("control_bytes", &MemoryPlan::control_bytes)
      .field("workspace_bytes", &MemoryPlan::workspace_bytes)
      .field("allocated_bytes", &MemoryPlan::allocated_bytes,
             "The sum of all: what the context allocates.");
  module.def(
      "plan_memory",
      [](nb::handle config, int ep_size, const std::string& backend, int num_threads) {
        return plan_memory(config_of(config), ep_size, target_of(backend, num_threads));
      },
      "config"_a.none(), "ep_size"_a, nb::kw_only(), "backend"_a = "cpu", "num_threads"_a = 1,
      "Sizes everything that a context of `config` on one of `ep_size` ranks allocates. Allocates "
      "nothing, asks no device.");
}

void bind_physical_sections(nb::module_& module) {
  ValueClass<PhysicalSections>(
      module, "PhysicalSections",
      "Where the memory of a rank on a GPU with host scratch is, in bytes.")
      .field("granularity_bytes", &PhysicalSections::granularity_bytes)
      .field("device_prefix_bytes", &PhysicalSections::device_prefix_bytes, "Slots.")
      .field("host_bytes", &PhysicalSections::host_bytes,
             "0 where host scratch fills no piece of its own.")
      .field("device_hot_bytes", &PhysicalSections::device_hot_bytes,
             "Device scratch and what follows.")
      .field("padding_bytes", &PhysicalSections::padding_bytes,
             "Of all that is no memory of the plan.");
  module.def("physical_sections", &physical_sections, "plan"_a, "granularity_bytes"_a = 2 << 20,
             "Of a device whose memory comes in pieces of `granularity_bytes`: NVIDIA's in 2 MiB.");
}

void bind_budget(nb::module_& module) {
  ValueClass<BudgetReport>(module, "BudgetReport",
                           "Whether a plan fits a budget of bytes a rank, and what would.")
      .field("fits", &BudgetReport::fits)
      .field("budget_bytes", &BudgetReport::budget_bytes)
      .field("needed_bytes", &BudgetReport::needed_bytes)
      .field("largest_max_tokens", &BudgetReport::largest_max_tokens)
      .field("largest_num_slots", &BudgetReport::largest_num_slots)
      .field("largest_scratch_factor", &BudgetReport::largest_scratch_factor)
      .field("factor_is_total", &BudgetReport::factor_is_total);
  module.def(
      "check_budget",
      [](nb::handle config, int ep_size, std::int64_t budget_bytes, const std::string& backend,
         int num_threads) {
        return check_budget(config_of(config), ep_size, budget_bytes,
                            target_of(backend, num_threads));
      },
      "config"_a.none(), "ep_size"_a, "budget_bytes"_a, nb::kw_only(), "backend"_a = "cpu",
      "num_threads"_a = 1);
  module.def(
      "explain",
      [](nb::handle config, const MemoryPlan& plan) { return explain(config_of(config), plan); },
      "config"_a.none(), "plan"_a, "A plan in words; `plan` is plan_memory's of `config`.");
  module.def(
      "explain", [](const BudgetReport& report) { return explain(report); }, "report"_a);
}

std::optional<PipelineActionKind> action_kind(const std::string& name) {
  if (name == "forward") return PipelineActionKind::kForward;
  if (name == "backward") return PipelineActionKind::kBackward;
  if (name == "backward_input") return PipelineActionKind::kBackwardInput;
  if (name == "backward_weight") return PipelineActionKind::kBackwardWeight;
  return std::nullopt;
}

using ActionTuple = std::tuple<std::string, std::int64_t, std::int64_t>;

std::vector<PipelineAction> actions_of(const std::vector<ActionTuple>& tuples) {
  std::vector<PipelineAction> actions;
  for (const auto& [name, stage, microbatch] : tuples) {
    const auto kind = action_kind(name);
    if (!kind) {
      throw Error(ErrorCode::kInvalidArgument,
                  concat("action ", actions.size(), " is '", name,
                         "'; legal is one of forward, backward, backward_input, backward_weight"));
    }
    actions.push_back({*kind, stage, microbatch});
  }
  return actions;
}

void bind_slot_assignment(nb::module_& module) {
  ValueClass<SlotUse>(module, "SlotUse", "The slot of one stage of one microbatch.")
      .field("stage", &SlotUse::stage)
      .field("microbatch", &SlotUse::microbatch)
      .field("slot", &SlotUse::slot, "-1 for a stage without MoE layers")
      .field("num_moe_layers", &SlotUse::num_moe_layers);
  ValueClass<SlotAssignment> assignment(module, "SlotAssignment",
                                        "The slots of one pipeline rank.");
  assignment
      .field(
          "grouping",
          [](const SlotAssignment& self) { return std::string(option_name(self.grouping)); },
          [](SlotAssignment& self, const std::string& name) {
            self.grouping = choice_of<SlotGrouping>("grouping", name);
          })
      .field("num_activation_slots", &SlotAssignment::num_activation_slots)
      .field("max_moe_layers_per_activation_slot",
             &SlotAssignment::max_moe_layers_per_activation_slot)
      .field("uses", &SlotAssignment::uses);
  assignment.type().def("use_of", &SlotAssignment::use_of, "stage"_a, "microbatch"_a,
                        nb::rv_policy::reference_internal);
  module.def(
      "assign_activation_slots",
      [](const std::vector<ActionTuple>& actions,
         const std::vector<std::pair<std::int64_t, std::int64_t>>& stages,
         std::int64_t num_microbatches, const std::string& grouping) {
        std::vector<PipelineStage> planned;
        planned.reserve(stages.size());
        for (const auto& [stage, num_moe_layers] : stages)
          planned.push_back({stage, num_moe_layers});
        return assign_activation_slots(actions_of(actions), planned, num_microbatches,
                                       choice_of<SlotGrouping>("grouping", grouping));
      },
      "actions"_a, "stages"_a, "num_microbatches"_a, "grouping"_a = "auto",
      "Assigns activation slots to the finalized schedule of one pipeline rank. `actions` are "
      "(kind, stage, microbatch) in execution order, kind one of forward, backward, backward_input "
      "and backward_weight; `stages` are (stage, num_moe_layers).");
}

}  // namespace

void bind_plan(nb::module_& module) {
  module.def(
      "validate", [](nb::handle config) { validate(config_of(config)); }, "config"_a.none());
  bind_memory_plan(module);
  bind_physical_sections(module);
  bind_budget(module);
  bind_slot_assignment(module);
}

}  // namespace distmoe::python
