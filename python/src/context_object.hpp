// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

#include "shared_context.hpp"

namespace distmoe::python {

/// distmoe.Context: a context and the Config that it was made of.
struct ContextObject {
  std::shared_ptr<SharedContext> shared;
  nanobind::object config;

  /// Runs a call without the GIL.
  template <typename Body>
  decltype(auto) run(const Body& body) const {
    const nanobind::gil_scoped_release release;
    return shared->run(body);
  }
};

}  // namespace distmoe::python
