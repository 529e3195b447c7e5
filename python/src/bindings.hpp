// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "distmoe/communicator.hpp"

namespace distmoe::python {

void bind_plan(nanobind::module_& module);
void bind_communicator(nanobind::module_& module);
void bind_context(nanobind::module_& module);
void bind_calls(nanobind::module_& module);
void bind_quantise(nanobind::module_& module);
void bind_saved_tensor(nanobind::module_& module);

/// The communicator that Python gave, null for None. One that Python implements is asked for its
/// rank, size and name, so that the library may use it. Raises TypeError for what is none, for a
/// class that lacks a method and for an object whose __init__ left out its base's. Needs the GIL.
std::shared_ptr<Communicator> communicator_of(const char* name, nanobind::handle given);

}  // namespace distmoe::python
