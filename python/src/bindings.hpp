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

/// Asks a communicator that Python implements for its rank, size and name. Needs the GIL; before
/// the library gets it.
void prepare(const std::shared_ptr<Communicator>& communicator);

}  // namespace distmoe::python
