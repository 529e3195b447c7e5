// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend/backend.hpp"
#include "runtime/backward.hpp"

namespace distmoe {

/// Checks the arguments of a backward call against the contract, every destination before any is
/// written. Throws invalid_argument with the tensor, what was given and what is legal; touches
/// nothing.
BackwardCall check_backward_call(const ContextImpl& context, std::int64_t call_index,
                                 const BackwardArguments& arguments);

}  // namespace distmoe
