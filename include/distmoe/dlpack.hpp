// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "distmoe/export.hpp"
#include "distmoe/tensor.hpp"

struct DLManagedTensor;

namespace distmoe {

/// Views a DLPack tensor. The view borrows: the DLManagedTensor must outlive it. `byte_offset` is
/// applied; missing strides mean row-major. Throws invalid_argument for no dimension or more than
/// kMaxTensorRank, a negative extent or a size beyond 64 bits; unsupported for vector lanes, a
/// device that is neither CPU (pinned host memory counts as CPU) nor CUDA, or a type without a
/// DType.
DISTMOE_EXPORT TensorView from_dlpack(const DLManagedTensor& tensor);

/// Wraps a view for a DLPack consumer. The memory stays the caller's: the deleter frees the header
/// alone. The 8-bit float types have no DLPack 0.6 code and travel as uint8.
DISTMOE_EXPORT DLManagedTensor* to_dlpack(const TensorView& view);

}  // namespace distmoe
