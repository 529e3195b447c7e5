// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backend/backend.hpp"
#include "backend/cuda/call_frame.hpp"

namespace distmoe::cuda {

/// Throws what a fault record of the device means, in words.
[[noreturn]] void throw_fault(const FaultRecord& fault, std::int64_t call,
                              const BackendSetup& setup);

}  // namespace distmoe::cuda
