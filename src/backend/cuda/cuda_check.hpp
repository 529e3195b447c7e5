// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

namespace distmoe::cuda {

/// Throws out_of_memory or device_fault with the call and CUDA's words unless `error` is success.
void check(cudaError_t error, const char* call);

}  // namespace distmoe::cuda

#define DISTMOE_CUDA_CHECK(call) ::distmoe::cuda::check((call), #call)
