// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <string>

#include "distmoe/config.hpp"
#include "distmoe/memory_plan.hpp"
#include "errors.hpp"
#include "plan/option_names.hpp"

namespace distmoe::python {

/// The choice that a user names. Throws invalid_argument with the legal names.
template <typename Choice>
Choice choice_of(const char* name, const std::string& text) {
  for (int value = 0; is_known(static_cast<Choice>(value)); ++value) {
    if (text == option_name(static_cast<Choice>(value))) return static_cast<Choice>(value);
  }
  throw Error(ErrorCode::kInvalidArgument,
              concat(name, " is '", text, "'; legal is one of ", legal_options<Choice>()));
}

/// Raises invalid_argument for what is no number of milliseconds in 64 bits.
std::chrono::milliseconds milliseconds_of(const char* name, double seconds);

/// The C++ configuration of a distmoe.Config. Raises TypeError for a field of another type, with
/// its name and value; validates nothing else.
Config config_of(nanobind::handle config);

}  // namespace distmoe::python
