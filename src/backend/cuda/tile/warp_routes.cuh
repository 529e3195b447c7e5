// SPDX-License-Identifier: Apache-2.0
//
// Routes that the warps of a block walk in order, counting what each expert has before.
#pragma once

#include <cstdint>

namespace distmoe::cuda {

/// This warp's part of `num_routes`, contiguous, so that the warps of a block of `num_threads`
/// follow each other in route order.
struct WarpPart {
  int begin;
  int end;
  __device__ WarpPart(int num_routes, int num_threads) {
    const int per_warp = (num_routes + num_threads - 1) / num_threads * 32;
    begin = min(num_routes, static_cast<int>(threadIdx.x) / 32 * per_warp);
    end = min(num_routes, begin + per_warp);
  }
};

/// Walks a warp's routes in order: use(route, expert, rows of the expert before it) for those that
/// expert_of(route) gives an expert >= 0. `before` [experts] counts them. By the whole warp.
template <typename ExpertOf, typename Use>
__device__ __forceinline__ void walk_routes(const WarpPart& part, const ExpertOf& expert_of,
                               std::uint16_t* before, const Use& use) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int base = part.begin; base < part.end; base += 32) {
    const int route = base + lane;
    const int expert = route < part.end ? expert_of(route) : -1;
    const unsigned same = __match_any_sync(~0u, expert);
    if (expert >= 0) use(route, expert, before[expert] + __popc(same & ((1u << lane) - 1)));
    __syncwarp();
    if (expert >= 0 && lane == __ffs(static_cast<int>(same)) - 1) {
      before[expert] = static_cast<std::uint16_t>(before[expert] + __popc(same));
    }
    __syncwarp();
  }
}

}  // namespace distmoe::cuda
