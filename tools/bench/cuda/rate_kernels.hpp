// SPDX-License-Identifier: Apache-2.0
//
// Kernels that do nothing but move bytes: what a benchmark holds a call's rates against.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace distmoe::tools {

/// Reads `bytes`, a multiple of 16, and writes one word to `sink` in a case that never happens.
cudaError_t launch_read(const void* data, std::size_t bytes, unsigned* sink, cudaStream_t stream);

/// Writes a pattern to `bytes`, a multiple of 16.
cudaError_t launch_write(void* to, std::size_t bytes, cudaStream_t stream);

/// Copies `bytes`, a multiple of 16, to this device from a peer's memory, read by the kernel.
cudaError_t launch_pull(void* to, const void* peer, std::size_t bytes, cudaStream_t stream);

}  // namespace distmoe::tools
