// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>

#include "distmoe/tensor.hpp"

namespace distmoe {

enum class Access { kRead, kWritten };

struct NamedTensor {
  const char* name;
  const TensorView* tensor;  ///< may be not given
  Access access;
};

/// Throws invalid_argument for the first two tensors of which one is written and that have an
/// element's memory in common, naming both and the bytes from their first to their last. What lies
/// between the elements of a strided tensor is not its memory.
void check_apart(std::initializer_list<NamedTensor> tensors);

}  // namespace distmoe
