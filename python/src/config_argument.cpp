// SPDX-License-Identifier: Apache-2.0
#include "config_argument.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <limits>
#include <optional>

namespace nb = nanobind;

namespace distmoe::python {
namespace {

constexpr std::int64_t kAnyInteger = 0;

/// What Python calls the types that fields have.
const char* type_text(std::int64_t) { return "an integer"; }
const char* type_text(double) { return "a number"; }
const char* type_text(bool) { return "a bool"; }
const char* type_text(const std::string&) { return "a string"; }

/// Reads the fields of a Python object by their names.
class Fields {
 public:
  Fields(nb::handle object, const char* prefix) : object_(object), prefix_(prefix) {}

  template <typename Value>
  void read(const char* name, Value& value) const {
    const nb::object field = object_.attr(name);
    // NOTE: Python counts bools among the integers and numbers; a size of True is a mistake.
    const bool is_misplaced_bool = !std::is_same_v<Value, bool> && PyBool_Check(field.ptr());
    if (is_misplaced_bool || !nb::try_cast(field, value)) refuse(name, field, type_text(Value()));
  }

  template <typename Value>
  void read(const char* name, std::optional<Value>& value) const {
    value.reset();
    if (is_none(name)) return;
    Value given{};
    read(name, given);
    value = given;
  }

  template <typename Choice>
  void read_choice(const char* name, Choice& value) const {
    std::string text;
    read(name, text);
    value = choice_of<Choice>(name, text);
  }

  bool is_none(const char* name) const { return object_.attr(name).is_none(); }
  nb::object get(const char* name) const { return object_.attr(name); }

 private:
  [[noreturn]] void refuse(const char* name, nb::handle field, const char* legal) const {
    const bool is_integer = PyLong_Check(field.ptr()) && !PyBool_Check(field.ptr()) &&
                            std::string(legal) == type_text(kAnyInteger);
    const std::string text = concat(prefix_, name, " is ", nb::repr(field).c_str());
    if (is_integer) {
      throw Error(ErrorCode::kInvalidArgument, concat(text, ", beyond 64 bits"));
    }
    throw_type_error(concat(text, "; it must be ", legal));
  }

  nb::handle object_;
  const char* prefix_;
};

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
