// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include "errors.hpp"

namespace distmoe::python {

/// Lets copy and pickle raise TypeError with the reason.
template <typename Class>
void refuse_copies(Class& type, const char* why) {
  type.def("__reduce_ex__", [why](nanobind::handle self, int) -> nanobind::object {
    throw_type_error(concat("cannot copy or pickle a distmoe.",
                            nanobind::str(self.type().attr("__name__")).c_str(), ": ", why));
  });
}

}  // namespace distmoe::python
