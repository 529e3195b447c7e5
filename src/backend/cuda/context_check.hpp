// SPDX-License-Identifier: Apache-2.0
//
// What a context on a GPU refuses before it allocates anything.
#pragma once

#include "backend/backend.hpp"
#include "backend/cuda/select/kernel_choice.hpp"

namespace distmoe::cuda {

/// Without what is known of the device.
ChoiceInputs choice_inputs(const BackendSetup& setup);

/// Throws where there is no such device, this backend cannot do what the configuration asks for, or
/// a stream of this thread is being captured. Makes the device current and returns the setup.
BackendSetup check_device(BackendSetup setup);

}  // namespace distmoe::cuda
