// SPDX-License-Identifier: Apache-2.0
//
// distmoe._core: the public C++ interface. Everything that computes or waits releases the GIL.
#include "bindings.hpp"
#include "distmoe/version.hpp"
#include "errors.hpp"
#include "prepared_argument.hpp"
#include "tensor_argument.hpp"

namespace distmoe::python {
namespace {

void bind(nanobind::module_& module) {
  // NOTE: a context that nobody closed is no leak to report: the library never prints.
  nanobind::set_leak_warnings(false);
  module.attr("version") = version();
  translate_errors();
  bind_tensors(module);
  bind_prepared_weight(module);
  bind_plan(module);
  bind_communicator(module);
  bind_context(module);
  bind_calls(module);
  bind_quantise(module);
  bind_saved_tensor(module);
}

}  // namespace
}  // namespace distmoe::python

// NOLINTNEXTLINE(cppcoreguidelines-pro-type-cstyle-cast): in nanobind's macro.
NB_MODULE(_core, module) { distmoe::python::bind(module); }
