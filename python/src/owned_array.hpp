// SPDX-License-Identifier: Apache-2.0
//
// Arrays that the module makes: their memory belongs to a Python object, and they cross by DLPack.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "distmoe/tensor.hpp"

namespace distmoe::python {

/// Memory for `view`, not filled, which `view.data` then names.
nanobind::capsule allocate(TensorView& view);

/// The bits of an array as they lie: uint8, or FP32 where it is that. None for one that is not
/// given.
nanobind::object array_of(const TensorView& view, const nanobind::object& owner);

/// `view`, whose bits may be uint8, as what they are; invalid_argument where they are neither.
TensorView as_bits(const std::string& name, TensorView view, DType dtype);

}  // namespace distmoe::python
