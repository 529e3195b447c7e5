// SPDX-License-Identifier: Apache-2.0
//
// The first pass of routing.cuh: the routes of a chunk to every expert, and its tokens that this
// rank gathers.
#pragma once

#include "backend/cuda/kernels/routing.cuh"

namespace distmoe::cuda {

/// `counts` [E] is shared memory. By the whole block.
__device__ inline void count_chunk(const RouteArgs& args, const Chunk& chunk,
                                   std::int32_t* counts) {
  for (int expert = static_cast<int>(threadIdx.x); expert < args.num_experts;
       expert += kRouteChunkThreads) {
    counts[expert] = 0;
  }
  __syncthreads();
  for (int route = static_cast<int>(threadIdx.x); route < chunk.num_tokens * args.top_k;
       route += kRouteChunkThreads) {
    const std::int32_t id = chunk.ids[route];
    if (id >= 0 && id < args.num_experts) atomicAdd(&counts[id], 1);
  }
  const bool gathers = chunk.source != args.rank && is_wanted(args, chunk, LocalExperts(args));
  const int gathered = __syncthreads_count(gathers);
  std::int32_t* out = args.chunk_counts + static_cast<std::int64_t>(chunk.index) * args.num_experts;
  for (int expert = static_cast<int>(threadIdx.x); expert < args.num_experts;
       expert += kRouteChunkThreads) {
    out[expert] = counts[expert];
  }
  if (threadIdx.x == 0) args.chunk_tokens[chunk.index] = gathered;
}

}  // namespace distmoe::cuda
