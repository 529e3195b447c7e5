// SPDX-License-Identifier: Apache-2.0
//
// The memory plan: rows, scratch, slots and totals of one rank. Formulas: docs/memory-plan.md.
#include "distmoe/memory_plan.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/checked_math.hpp"
#include "core/current_error.hpp"
#include "layout/context_buffers.hpp"
#include "plan/capacity_rows.hpp"
#include "plan/expert_partition.hpp"
#include "plan/layer_bytes.hpp"
#include "plan/option_names.hpp"

namespace distmoe {
namespace {

struct CheckedMath {
  static std::int64_t add(std::int64_t a, std::int64_t b) { return checked_add(a, b); }
  static std::int64_t mul(std::int64_t a, std::int64_t b) { return checked_mul(a, b); }
};

/// Where doubles stop being representable as int64.
constexpr double kTwoTo63 = 9223372036854775808.0;

void plan_factors(const Config& config, int ep_size, MemoryPlan& plan) {
  const double most = ep_size;
  plan.device_scratch_factor = std::min(config.device_scratch_capacity_factor, most);
  plan.total_scratch_factor = plan.device_scratch_factor;
  if (!config.host_scratch) return;
  plan.total_scratch_factor = std::min(config.host_scratch->total_scratch_capacity_factor, most);
  DISTMOE_CHECK(plan.total_scratch_factor >= plan.device_scratch_factor, kInvalidArgument,
                "total_scratch_capacity_factor is ",
                config.host_scratch->total_scratch_capacity_factor,
                "; it must cover at least the device_scratch_capacity_factor, which is ",
                plan.device_scratch_factor);
}

std::int64_t selected_slot_bytes(const Config& config, const MemoryPlan& plan) {
  if (config.activation_slot_bytes) {
    DISTMOE_CHECK(*config.activation_slot_bytes >= plan.minimum_slot_bytes, kInvalidArgument,
                  "activation_slot_bytes is ", *config.activation_slot_bytes, "; minimum required ",
                  plan.minimum_slot_bytes, " (the inputs of every layer of a slot)");
    return align_up(*config.activation_slot_bytes);
  }
  if (!config.activation_slot_capacity_factor) return plan.minimum_slot_bytes;
  const double factor = *config.activation_slot_capacity_factor;
  const std::int64_t span = plan.balanced_slot_bytes - plan.minimum_slot_bytes;
  const double above = std::ceil(factor * static_cast<double>(span));
  DISTMOE_CHECK(above < kTwoTo63, kInvalidArgument, "activation_slot_capacity_factor is ", factor,
                "; the slot does not fit in 64 bits, a factor of 1 takes ",
                plan.balanced_slot_bytes, " bytes");
  return align_up(checked_add(plan.minimum_slot_bytes, static_cast<std::int64_t>(above)));
}

void plan_slots(const Config& config, const LayerBytes<CheckedMath>& layer,
                std::int64_t balanced_padded_rows, MemoryPlan& plan) {
  plan.saved_input_bytes_per_layer = layer.input(config.max_tokens);
  // NOTE: an inference context saves nothing, so every slot size is 0.
  if (config.inference) return;
  const std::int64_t layers = config.max_moe_layers_per_activation_slot;
  plan.saved_bytes_per_layer_balanced = layer.saved(config.max_tokens, balanced_padded_rows);
  plan.minimum_slot_bytes = align_up(checked_mul(layers, plan.saved_input_bytes_per_layer));
  plan.balanced_slot_bytes = align_up(checked_mul(layers, plan.saved_bytes_per_layer_balanced));
  plan.max_useful_slot_bytes =
      align_up(checked_mul(layers, layer.saved(config.max_tokens, plan.total_scratch_rows)));
  plan.slot_bytes = selected_slot_bytes(config, plan);
  plan.num_slots = config.num_activation_slots;
  plan.total_activation_bytes = checked_mul(plan.num_slots, plan.slot_bytes);
}

std::int64_t sum_of_bytes(const std::vector<PlanBuffer>& buffers) {
  std::int64_t bytes = 0;
  for (const PlanBuffer& buffer : buffers) bytes = checked_add(bytes, buffer.bytes);
  return bytes;
}

void plan_buffers(ContextBuffers buffers, MemoryPlan& plan) {
  plan.communication_buffers = std::move(buffers.communication);
  plan.metadata_buffers = std::move(buffers.metadata);
  plan.control_buffers = std::move(buffers.control);
  plan.workspace_buffers = std::move(buffers.workspace);
  plan.communication_bytes = sum_of_bytes(plan.communication_buffers);
  plan.metadata_bytes = sum_of_bytes(plan.metadata_buffers);
  plan.control_bytes = sum_of_bytes(plan.control_buffers);
  plan.workspace_bytes = sum_of_bytes(plan.workspace_buffers);
}

}  // namespace

std::int64_t capacity_rows(const Config& config, int ep_size, double factor) {
  const std::int64_t balanced = checked_mul(config.max_tokens, config.top_k);
  const std::int64_t per_token =
      config.distinct_experts
          ? std::min(config.top_k, max_local_experts(config.num_experts, ep_size))
          : config.top_k;
  const std::int64_t most = checked_product(config.max_tokens, std::int64_t{ep_size}, per_token);
  // NOTE: two roundings (the product, then + 0.5); -ffp-contract=off keeps them apart.
  const double wanted = static_cast<double>(balanced) * factor;
  const double rounded = std::floor(wanted + 0.5);
  return rounded < kTwoTo63 ? std::min(static_cast<std::int64_t>(rounded), most) : most;
}

std::int64_t padded_capacity_rows(const Config& config, int ep_size, double factor) {
  const std::int64_t rows = capacity_rows(config, ep_size, factor);
  if (!is_block_scaled(config.precision)) return rows;
  const std::int64_t experts = max_local_experts(config.num_experts, ep_size);
  const std::int64_t padded = checked_add(rows, checked_mul(experts, kExpertRowAlignment - 1));
  return padded / kExpertRowAlignment * kExpertRowAlignment;
}

namespace {

MemoryPlan make_plan(const Config& config, int ep_size, const PlanTarget& target) {
  validate(config);
  DISTMOE_CHECK(ep_size >= 1, kInvalidArgument, "ep_size is ", ep_size, "; legal is 1 or more");
  check_choice("backend", target.backend);
  DISTMOE_CHECK(target.num_threads >= 1, kInvalidArgument, "num_threads is ", target.num_threads,
                "; legal is 1 or more");
  MemoryPlan plan;
  plan.target = target;
  if (target.backend == BackendKind::kCuda) plan.target.num_threads = 1;  // of no effect
  const LayerBytes<CheckedMath> layer{layer_dims(config)};
  plan_factors(config, ep_size, plan);
  plan.balanced_rows = checked_mul(config.max_tokens, config.top_k);
  plan.device_scratch_rows = padded_capacity_rows(config, ep_size, plan.device_scratch_factor);
  plan.total_scratch_rows = padded_capacity_rows(config, ep_size, plan.total_scratch_factor);
  plan.device_scratch_bytes = layer.scratch(plan.device_scratch_rows);
  plan.host_scratch_bytes =
      std::max<std::int64_t>(0, layer.scratch(plan.total_scratch_rows) - plan.device_scratch_bytes);
  plan_slots(config, layer, padded_capacity_rows(config, ep_size, 1.0), plan);
  plan.total_device_bytes = checked_add(plan.total_activation_bytes, plan.device_scratch_bytes);
  plan.total_virtual_bytes = checked_add(plan.total_device_bytes, plan.host_scratch_bytes);
  plan_buffers(context_buffers(config, ep_size, target,
                               {capacity_rows(config, ep_size, plan.total_scratch_factor),
                                plan.total_scratch_rows},
                               max_local_experts(config.num_experts, ep_size)),
               plan);
  plan.allocated_bytes = plan.total_virtual_bytes;
  for (const std::int64_t bytes :
       {plan.communication_bytes, plan.metadata_bytes, plan.control_bytes, plan.workspace_bytes}) {
    plan.allocated_bytes = checked_add(plan.allocated_bytes, bytes);
  }
  return plan;
}

}  // namespace

MemoryPlan plan_memory(const Config& config, int ep_size, const PlanTarget& target) {
  return only_errors("a memory plan", [&] { return make_plan(config, ep_size, target); });
}

PhysicalSections physical_sections(const MemoryPlan& plan, std::int64_t granularity_bytes) {
  DISTMOE_CHECK(granularity_bytes >= 1, kInvalidArgument, "granularity_bytes is ",
                granularity_bytes, "; legal is 1 or more");
  const auto pieces = [&](std::int64_t bytes) {
    return checked_mul(ceil_div(bytes, granularity_bytes), granularity_bytes);
  };
  const std::int64_t planned = plan.allocated_bytes - plan.communication_bytes;
  const std::int64_t all = pieces(planned);
  const std::int64_t slots = pieces(plan.total_activation_bytes);
  const std::int64_t hot_begin = (plan.total_activation_bytes + plan.host_scratch_bytes) /
                                 granularity_bytes * granularity_bytes;
  PhysicalSections sections;
  sections.granularity_bytes = granularity_bytes;
  sections.host_bytes = std::max<std::int64_t>(0, hot_begin - slots);
  sections.device_prefix_bytes = sections.host_bytes > 0 ? slots : 0;
  sections.device_hot_bytes = all - sections.device_prefix_bytes - sections.host_bytes;
  sections.padding_bytes = all - planned;
  return sections;
}

}  // namespace distmoe
