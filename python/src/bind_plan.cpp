// SPDX-License-Identifier: Apache-2.0
//
// The memory plan, the budget check and the slots of pipeline schedules: pure functions.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

#include "bindings.hpp"
#include "config_argument.hpp"
#include "distmoe/slot_assignment.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace distmoe::python {
namespace {

PlanTarget target_of(const std::string& backend, int num_threads) {
  return {.backend = choice_of<BackendKind>("backend", backend), .num_threads = num_threads};
}

void bind_memory_plan(nb::module_& module) {
  nb::class_<PlanBuffer>(module, "PlanBuffer", "One named buffer of a context.")
      .def_ro("name", &PlanBuffer::name)
      .def_ro("bytes", &PlanBuffer::bytes)
      .def("__repr__", [](const PlanBuffer& self) {
        return concat("PlanBuffer('", self.name, "', ", self.bytes, ")");
      });
  nb::class_<MemoryPlan>(module, "MemoryPlan",
                         "What one rank allocates, exactly. Sizes in bytes unless they say rows.")
      .def_prop_ro("backend",
                   [](const MemoryPlan& self) { return option_name(self.target.backend); })
      .def_prop_ro("num_threads", [](const MemoryPlan& self) { return self.target.num_threads; })
      .def_ro("balanced_rows", &MemoryPlan::balanced_rows)
      .def_ro("device_scratch_rows", &MemoryPlan::device_scratch_rows)
      .def_ro("total_scratch_rows", &MemoryPlan::total_scratch_rows)
      .def_ro("device_scratch_factor", &MemoryPlan::device_scratch_factor)
      .def_ro("total_scratch_factor", &MemoryPlan::total_scratch_factor)
      .def_ro("saved_input_bytes_per_layer", &MemoryPlan::saved_input_bytes_per_layer)
      .def_ro("saved_bytes_per_layer_balanced", &MemoryPlan::saved_bytes_per_layer_balanced)
      .def_ro("device_scratch_bytes", &MemoryPlan::device_scratch_bytes)
      .def_ro("host_scratch_bytes", &MemoryPlan::host_scratch_bytes)
      .def_ro("minimum_slot_bytes", &MemoryPlan::minimum_slot_bytes)
      .def_ro("balanced_slot_bytes", &MemoryPlan::balanced_slot_bytes)
      .def_ro("max_useful_slot_bytes", &MemoryPlan::max_useful_slot_bytes)
      .def_ro("slot_bytes", &MemoryPlan::slot_bytes)
      .def_ro("num_slots", &MemoryPlan::num_slots)
      .def_ro("total_activation_bytes", &MemoryPlan::total_activation_bytes)
      .def_ro("total_device_bytes", &MemoryPlan::total_device_bytes)
      .def_ro("total_virtual_bytes", &MemoryPlan::total_virtual_bytes)
      .def_ro("communication_buffers", &MemoryPlan::communication_buffers)
      .def_ro("metadata_buffers", &MemoryPlan::metadata_buffers)
      .def_ro("control_buffers", &MemoryPlan::control_buffers)
      .def_ro("workspace_buffers", &MemoryPlan::workspace_buffers)
      .def_ro("communication_bytes", &MemoryPlan::communication_bytes)
      .def_ro("metadata_bytes", &MemoryPlan::metadata_bytes)
      .def_ro("control_bytes", &MemoryPlan::control_bytes)
      .def_ro("workspace_bytes", &MemoryPlan::workspace_bytes)
      .def_ro("allocated_bytes", &MemoryPlan::allocated_bytes,
              "The sum of all: what the context allocates.")
      .def("__eq__", [](const MemoryPlan& self, nb::handle other) {
        MemoryPlan* plan = nullptr;
        return nb::try_cast(other, plan) && plan != nullptr && self == *plan;
      });
  module.def(
      "plan_memory",
      [](nb::handle config, int ep_size, const std::string& backend, int num_threads) {
        return plan_memory(config_of(config), ep_size, target_of(backend, num_threads));
      },
      "config"_a, "ep_size"_a, nb::kw_only(), "backend"_a = "cpu", "num_threads"_a = 1,
      "Sizes everything that a context of `config` on one of `ep_size` ranks allocates. Allocates "
      "nothing, asks no device.");
}

void bind_budget(nb::module_& module) {
  nb::class_<BudgetReport>(module, "BudgetReport",
                           "Whether a plan fits a budget of bytes a rank, and what would.")
      .def_ro("fits", &BudgetReport::fits)
      .def_ro("budget_bytes", &BudgetReport::budget_bytes)
      .def_ro("needed_bytes", &BudgetReport::needed_bytes)
      .def_ro("largest_max_tokens", &BudgetReport::largest_max_tokens)
      .def_ro("largest_num_slots", &BudgetReport::largest_num_slots)
      .def_ro("largest_scratch_factor", &BudgetReport::largest_scratch_factor)
      .def_ro("factor_is_total", &BudgetReport::factor_is_total);
  module.def(
      "check_budget",
      [](nb::handle config, int ep_size, std::int64_t budget_bytes, const std::string& backend,
         int num_threads) {
        return check_budget(config_of(config), ep_size, budget_bytes,
                            target_of(backend, num_threads));
      },
      "config"_a, "ep_size"_a, "budget_bytes"_a, nb::kw_only(), "backend"_a = "cpu",
      "num_threads"_a = 1);
  module.def(
      "explain",
      [](nb::handle config, const MemoryPlan& plan) { return explain(config_of(config), plan); },
      "config"_a, "plan"_a, "A plan in words; `plan` is plan_memory's of `config`.");
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
  nb::class_<SlotUse>(module, "SlotUse", "The slot of one stage of one microbatch.")
      .def_ro("stage", &SlotUse::stage)
      .def_ro("microbatch", &SlotUse::microbatch)
      .def_ro("slot", &SlotUse::slot, "-1 for a stage without MoE layers")
      .def_ro("num_moe_layers", &SlotUse::num_moe_layers);
  nb::class_<SlotAssignment>(module, "SlotAssignment")
      .def_prop_ro("grouping",
                   [](const SlotAssignment& self) { return option_name(self.grouping); })
      .def_ro("num_activation_slots", &SlotAssignment::num_activation_slots)
      .def_ro("max_moe_layers_per_activation_slot",
              &SlotAssignment::max_moe_layers_per_activation_slot)
      .def_ro("uses", &SlotAssignment::uses)
      .def("use_of", &SlotAssignment::use_of, "stage"_a, "microbatch"_a,
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
      "validate", [](nb::handle config) { validate(config_of(config)); }, "config"_a);
  bind_memory_plan(module);
  bind_budget(module);
  bind_slot_assignment(module);
}

}  // namespace distmoe::python
