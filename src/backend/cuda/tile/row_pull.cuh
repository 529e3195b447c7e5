// SPDX-License-Identifier: Apache-2.0
//
// Pulls rows out of peers' windows into the gather buffer, chunk by chunk in the buffer's order,
// and raises a chunk's flag when all its rows have arrived.
#pragma once

#include <cstdint>

#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.hpp"
#include "backend/cuda/ptx/flag.cuh"
#include "backend/cuda/tile/gemm_storage.hpp"
#include "backend/cuda/tile/warp_copy.cuh"

namespace distmoe::cuda {

/// All threads of a pulling block; returns when no chunk is left to draw.
__device__ inline void pull_rows(const GatherPull& pull, CallFrame* frame, GemmStorage& shared,
                                 int row_bytes) {
  const int num_rows = frame->num_gather_rows;
  const std::uint64_t buffer = *pull.buffer;
  const int warp = static_cast<int>(threadIdx.x / 32);
  constexpr int kWarps = kGemmThreads / 32;
  while (true) {
    if (threadIdx.x == 0) shared.pulled_chunk = atomicAdd(&frame->next_gather_chunk, 1);
    __syncthreads();
    const int chunk = shared.pulled_chunk;
    const int begin = chunk * kGatherChunkRows;
    if (begin >= num_rows) return;
    const int end = min(begin + kGatherChunkRows, num_rows);
    for (int row = begin + warp; row < end; row += kWarps) {
      copy_row(pull.source_address[row], buffer + row * pull.buffer_stride_bytes, row_bytes);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      ptx::store_release_gpu(&pull.ready[chunk], frame->gather_epoch);
    }
  }
}

}  // namespace distmoe::cuda
