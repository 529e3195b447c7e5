// SPDX-License-Identifier: Apache-2.0
#include "plan_report.hpp"

#include <nlohmann/json.hpp>
#include <vector>

#include "plan/option_names.hpp"

namespace distmoe::tools {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const std::vector<PlanBuffer>& buffers) {
  Json list = Json::array();
  for (const PlanBuffer& buffer : buffers) {
    list.push_back({{"name", buffer.name}, {"bytes", buffer.bytes}});
  }
  return list;
}

template <typename Value>
Json value_or_null(const std::optional<Value>& value) {
  return value ? Json(*value) : Json(nullptr);
}

}  // namespace

std::string json_of(const MemoryPlan& plan, const std::optional<BudgetReport>& budget) {
  Json object = {
      {"backend", option_name(plan.target.backend)},
      {"balanced_rows", plan.balanced_rows},
      {"device_scratch_rows", plan.device_scratch_rows},
      {"total_scratch_rows", plan.total_scratch_rows},
      {"device_scratch_factor", plan.device_scratch_factor},
      {"total_scratch_factor", plan.total_scratch_factor},
      {"saved_input_bytes_per_layer", plan.saved_input_bytes_per_layer},
      {"saved_bytes_per_layer_balanced", plan.saved_bytes_per_layer_balanced},
      {"device_scratch_bytes", plan.device_scratch_bytes},
      {"host_scratch_bytes", plan.host_scratch_bytes},
      {"minimum_slot_bytes", plan.minimum_slot_bytes},
      {"balanced_slot_bytes", plan.balanced_slot_bytes},
      {"max_useful_slot_bytes", plan.max_useful_slot_bytes},
      {"slot_bytes", plan.slot_bytes},
      {"total_activation_bytes", plan.total_activation_bytes},
      {"total_device_bytes", plan.total_device_bytes},
      {"total_virtual_bytes", plan.total_virtual_bytes},
      {"num_slots", plan.num_slots},
      {"communication_bytes", plan.communication_bytes},
      {"metadata_bytes", plan.metadata_bytes},
      {"control_bytes", plan.control_bytes},
      {"workspace_bytes", plan.workspace_bytes},
      {"allocated_bytes", plan.allocated_bytes},
      {"communication_buffers", json_of(plan.communication_buffers)},
      {"metadata_buffers", json_of(plan.metadata_buffers)},
      {"control_buffers", json_of(plan.control_buffers)},
      {"workspace_buffers", json_of(plan.workspace_buffers)},
  };
  if (budget) {
    object["budget"] = {
        {"fits", budget->fits},
        {"budget_bytes", budget->budget_bytes},
        {"needed_bytes", budget->needed_bytes},
        {"largest_max_tokens", value_or_null(budget->largest_max_tokens)},
        {"largest_num_slots", value_or_null(budget->largest_num_slots)},
        {"largest_scratch_factor", value_or_null(budget->largest_scratch_factor)},
    };
  }
  return object.dump(2) + '\n';
}

}  // namespace distmoe::tools
