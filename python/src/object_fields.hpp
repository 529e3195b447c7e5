// SPDX-License-Identifier: Apache-2.0
//
// The fields of a Python object, such as a dataclass of options, as values of C++.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "config_argument.hpp"
#include "errors.hpp"

namespace distmoe::python {

/// Reads the fields of a Python object by their names. What is of another type raises TypeError
/// with the field and its value.
class Fields {
 public:
  Fields(nanobind::handle object, const char* prefix) : object_(object), prefix_(prefix) {}

  template <typename Value>
  void read(const char* name, Value& value) const {
    read_value(concat(prefix_, name).c_str(), object_.attr(name), value);
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
  nanobind::object get(const char* name) const { return object_.attr(name); }

  /// The same of a value that is no field.
  template <typename Value>
  static void read_value(const char* name, nanobind::handle given, Value& value) {
    // NOTE: Python counts bools among the integers and numbers; a size of True is a mistake.
    const bool is_misplaced_bool = !std::is_same_v<Value, bool> && PyBool_Check(given.ptr());
    if (is_misplaced_bool || !nanobind::try_cast(given, value)) {
      constexpr bool kIsInteger = std::is_same_v<Value, std::int64_t>;
      refuse(name, given, kIsInteger, type_text(Value()));
    }
  }

 private:
  // What Python calls the types that fields have.
  static const char* type_text(std::int64_t) { return "an integer"; }
  static const char* type_text(double) { return "a number"; }
  static const char* type_text(bool) { return "a bool"; }
  static const char* type_text(const std::string&) { return "a string"; }

  [[noreturn]] static void refuse(const char* name, nanobind::handle given, bool wants_integer,
                                  const char* legal) {
    const std::string text = concat(name, " is ", nanobind::repr(given).c_str());
    if (wants_integer && PyLong_Check(given.ptr()) && !PyBool_Check(given.ptr())) {
      throw Error(ErrorCode::kInvalidArgument, concat(text, ", beyond 64 bits"));
    }
    throw_type_error(concat(text, "; it must be ", legal));
  }

  nanobind::handle object_;
  const char* prefix_;
};

}  // namespace distmoe::python
