// SPDX-License-Identifier: Apache-2.0
#include "runtime/config_record.hpp"

#include <limits>

#include "core/check.hpp"
#include "distmoe/version.hpp"

namespace distmoe {
namespace {

struct Field {
  const char* name;
  double value;
};

template <typename Number>
double optional_value(const std::optional<Number>& value) {
  return value ? static_cast<double>(*value) : -1.0;
}

template <typename Enum>
double enum_value(Enum value) {
  return static_cast<double>(static_cast<int>(value));
}

std::array<Field, kNumConfigFields> fields_of(const Config& config, const ContextOptions& options) {
  const auto number = [](std::int64_t value) { return static_cast<double>(value); };
  const double library_version =
      DISTMOE_VERSION_MAJOR * 1e6 + DISTMOE_VERSION_MINOR * 1e3 + DISTMOE_VERSION_PATCH;
  const bool has_host_scratch = config.host_scratch.has_value();
  return {{
      {"version of distmoe", library_version},
      {"backend", enum_value(options.backend)},
      {"max_tokens", number(config.max_tokens)},
      {"hidden_dim", number(config.hidden_dim)},
      {"intermediate_dim", number(config.intermediate_dim)},
      {"top_k", number(config.top_k)},
      {"num_experts", number(config.num_experts)},
      {"max_moe_layers_per_activation_slot", number(config.max_moe_layers_per_activation_slot)},
      {"device_scratch_capacity_factor", config.device_scratch_capacity_factor},
      {"activation_slot_bytes", optional_value(config.activation_slot_bytes)},
      {"activation_slot_capacity_factor", optional_value(config.activation_slot_capacity_factor)},
      {"num_activation_slots", number(config.num_activation_slots)},
      {"activation_policy", enum_value(config.activation_policy)},
      {"distinct_experts", config.distinct_experts ? 1.0 : 0.0},
      {"host_scratch", has_host_scratch ? 1.0 : 0.0},
      {"total_scratch_capacity_factor",
       has_host_scratch ? config.host_scratch->total_scratch_capacity_factor : 0.0},
      {"precision", enum_value(config.precision)},
      {"pipeline", enum_value(config.pipeline)},
      {"combine", enum_value(config.combine)},
      {"activation", enum_value(config.activation)},
      {"swiglu_alpha", config.swiglu_alpha},
      {"swiglu_limit", config.swiglu_limit},
      {"wgrad_dtype", enum_value(config.wgrad_dtype)},
      {"inference", config.inference ? 1.0 : 0.0},
      {"num_sms", optional_value(config.num_sms)},
      {"gate_up_layout", enum_value(config.gate_up_layout)},
      {"kernel_choice", enum_value(config.kernel_choice)},
      {"timeout (ms)", config.timeout ? number(config.timeout->count()) : -1.0},
  }};
}

}  // namespace

ConfigRecord record_config(const Config& config, const ContextOptions& options) {
  ConfigRecord record;
  const auto fields = fields_of(config, options);
  for (std::size_t i = 0; i < kNumConfigFields; ++i) record.values[i] = fields[i].value;
  return record;
}

std::string first_difference(const ConfigRecord& mine, const ConfigRecord& theirs) {
  static const auto names = fields_of({}, {});
  for (std::size_t i = 0; i < kNumConfigFields; ++i) {
    if (mine.values[i] != theirs.values[i]) {
      return concat(names[i].name, ": ", mine.values[i], " against ", theirs.values[i]);
    }
  }
  return {};
}

}  // namespace distmoe
