// SPDX-License-Identifier: Apache-2.0
#include "config_argument.hpp"

#include <cmath>

#include "object_fields.hpp"

namespace nb = nanobind;

namespace distmoe::python {
namespace {

void read_slots(const Fields& fields, Config& config) {
  fields.read("max_moe_layers_per_activation_slot", config.max_moe_layers_per_activation_slot);
  fields.read("activation_slot_bytes", config.activation_slot_bytes);
  fields.read("activation_slot_capacity_factor", config.activation_slot_capacity_factor);
  fields.read("num_activation_slots", config.num_activation_slots);
  fields.read_choice("activation_policy", config.activation_policy);
}

void read_host_scratch(const Fields& fields, Config& config) {
  if (fields.is_none("host_scratch")) return;
  const nb::object given = fields.get("host_scratch");
  const nb::object expected = nb::module_::import_("distmoe.config").attr("HostScratch");
  if (!nb::isinstance(given, expected)) {
    throw_type_error(
        concat("host_scratch is ", nb::repr(given).c_str(), "; it must be a HostScratch"));
  }
  const Fields host(given, "host_scratch.");
  HostScratch scratch;
  host.read("total_scratch_capacity_factor", scratch.total_scratch_capacity_factor);
  host.read("prefetch", scratch.prefetch);
  config.host_scratch = scratch;
}

void read_choices(const Fields& fields, Config& config) {
  fields.read_choice("precision", config.precision);
  fields.read_choice("pipeline", config.pipeline);
  fields.read_choice("combine", config.combine);
  fields.read_choice("activation", config.activation);
  fields.read("swiglu_alpha", config.swiglu_alpha);
  fields.read("swiglu_limit", config.swiglu_limit);
  if (!fields.is_none("wgrad_dtype")) fields.read_choice("wgrad_dtype", config.wgrad_dtype);
  fields.read("inference", config.inference);
  fields.read("num_sms", config.num_sms);
  fields.read_choice("gate_up_layout", config.gate_up_layout);
  fields.read_choice("kernel_choice", config.kernel_choice);
}

}  // namespace

std::chrono::milliseconds milliseconds_of(const char* name, double seconds) {
  constexpr double kLimit = 9.0e15;  // below 2^63 / 1000, as every double there is exact
  if (!std::isfinite(seconds) || std::abs(seconds) > kLimit) {
    throw Error(ErrorCode::kInvalidArgument,
                concat(name, " is ", seconds, " s; legal is a number of seconds up to ", kLimit));
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(seconds * 1000)));
}

Config config_of(nb::handle object) {
  const nb::object expected = nb::module_::import_("distmoe.config").attr("Config");
  if (!nb::isinstance(object, expected)) {
    throw_type_error(concat("config is ", nb::repr(object).c_str(), "; it must be a Config"));
  }
  const Fields fields(object, "");
  Config config;
  fields.read("max_tokens", config.max_tokens);
  fields.read("hidden_dim", config.hidden_dim);
  fields.read("intermediate_dim", config.intermediate_dim);
  fields.read("top_k", config.top_k);
  fields.read("num_experts", config.num_experts);
  read_slots(fields, config);
  fields.read("device_scratch_capacity_factor", config.device_scratch_capacity_factor);
  fields.read("distinct_experts", config.distinct_experts);
  read_host_scratch(fields, config);
  read_choices(fields, config);
  double seconds = 0;
  fields.read("timeout", seconds);
  config.timeout = milliseconds_of("timeout", seconds);
  return config;
}

}  // namespace distmoe::python
