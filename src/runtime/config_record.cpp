// SPDX-License-Identifier: Apache-2.0
#include "runtime/config_record.hpp"

#include <charconv>

#include "core/check.hpp"
#include "distmoe/version.hpp"
#include "plan/option_names.hpp"

namespace distmoe {
namespace {

/// How the words of a message are made from a value.
using Format = std::string (*)(double value);

struct Field {
  const char* name;
  double value;
  Format format;
};

std::string as_integer(double value) { return concat(static_cast<std::int64_t>(value)); }
std::string as_yes_or_no(double value) { return value != 0.0 ? "true" : "false"; }

/// As short as possible, with all digits that tell it from its neighbours.
std::string as_number(double value) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value);
  return {text.data(), end.ptr};
}

// Optional values are never negative.
constexpr double kNone = -1.0;
template <Format Given>
std::string or_none(double value) {
  return value == kNone ? "none" : Given(value);
}

template <typename Enum>
std::string as_name(double value) {
  return option_name(static_cast<Enum>(static_cast<int>(value)));
}

std::string as_version(double value) {
  const auto number = static_cast<std::int64_t>(value);
  return concat(number / 1'000'000, '.', number / 1'000 % 1'000, '.', number % 1'000);
}

template <typename Number>
double optional_value(const std::optional<Number>& value) {
  return value ? static_cast<double>(*value) : kNone;
}

Field size(const char* name, std::int64_t value) {
  return {name, static_cast<double>(value), as_integer};
}
Field number(const char* name, double value) { return {name, value, as_number}; }
Field flag(const char* name, bool value) { return {name, value ? 1.0 : 0.0, as_yes_or_no}; }
template <typename Enum>
Field choice(const char* name, Enum value) {
  return {name, static_cast<double>(static_cast<int>(value)), as_name<Enum>};
}

std::array<Field, kNumConfigFields> fields_of(const Config& config, const ContextOptions& options) {
  const double library_version =
      DISTMOE_VERSION_MAJOR * 1e6 + DISTMOE_VERSION_MINOR * 1e3 + DISTMOE_VERSION_PATCH;
  const auto& host = config.host_scratch;
  // NOTE: HostScratch::prefetch is left out: it says when a rank fetches its own pages and changes
  // neither its plan nor a byte that travels, so that ranks may differ in it.
  return {{
      {"version of distmoe", library_version, as_version},
      choice("backend", options.backend),
      size("max_tokens", config.max_tokens),
      size("hidden_dim", config.hidden_dim),
      size("intermediate_dim", config.intermediate_dim),
      size("top_k", config.top_k),
      size("num_experts", config.num_experts),
      size("max_moe_layers_per_activation_slot", config.max_moe_layers_per_activation_slot),
      number("device_scratch_capacity_factor", config.device_scratch_capacity_factor),
      {"activation_slot_bytes", optional_value(config.activation_slot_bytes), or_none<as_integer>},
      {"activation_slot_capacity_factor", optional_value(config.activation_slot_capacity_factor),
       or_none<as_number>},
      size("num_activation_slots", config.num_activation_slots),
      choice("activation_policy", config.activation_policy),
      flag("distinct_experts", config.distinct_experts),
      flag("host_scratch", host.has_value()),
      {"total_scratch_capacity_factor", host ? host->total_scratch_capacity_factor : kNone,
       or_none<as_number>},
      choice("precision", config.precision),
      choice("pipeline", config.pipeline),
      choice("combine", config.combine),
      choice("activation", config.activation),
      number("swiglu_alpha", config.swiglu_alpha),
      number("swiglu_limit", config.swiglu_limit),
      choice("wgrad_dtype", config.wgrad_dtype),
      flag("inference", config.inference),
      {"num_sms", optional_value(config.num_sms), or_none<as_integer>},
      choice("gate_up_layout", config.gate_up_layout),
      choice("kernel_choice", config.kernel_choice),
      {"timeout (ms)", config.timeout ? static_cast<double>(config.timeout->count()) : kNone,
       or_none<as_integer>},
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
  static const auto fields = fields_of({}, {});
  for (std::size_t i = 0; i < kNumConfigFields; ++i) {
    const Field& field = fields[i];
    if (mine.values[i] != theirs.values[i]) {
      return concat(field.name, ": ", field.format(mine.values[i]), " against ",
                    field.format(theirs.values[i]));
    }
  }
  return {};
}

}  // namespace distmoe
