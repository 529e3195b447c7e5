// SPDX-License-Identifier: Apache-2.0
//
// The third pass of routing.cuh: the row of every route of this rank's experts, and what is found
// through it.
#pragma once

#include <cub/block/block_scan.cuh>

#include "backend/cuda/kernels/routing.cuh"
#include "backend/cuda/tile/warp_routes.cuh"
#include "plan/expert_partition.hpp"

namespace distmoe::cuda {

/// counts[warp, expert] become those of the warps before.
__device__ inline void sum_warp_counts(std::uint16_t* counts, int num_local) {
  for (int expert = static_cast<int>(threadIdx.x); expert < num_local;
       expert += kRouteChunkThreads) {
    int before = 0;
    for (int warp = 0; warp < kRouteChunkWarps; ++warp) {
      std::uint16_t& count = counts[warp * num_local + expert];
      const int rows = count;
      count = static_cast<std::uint16_t>(before);
      before += rows;
    }
  }
}

__device__ inline void store_row(const RouteArgs& args, const Chunk& chunk, int route,
                                 std::int32_t row, std::int32_t gather_row) {
  // NOTE: what a row stands for is read twice, by count_chunk() and here. A peer that broke its
  // word in between must not make a row that no table has.
  if (row >= args.capacity_rows || gather_row >= args.gather_rows) return;
  const std::int64_t token = chunk.first_token + route / args.top_k;
  const std::int64_t k = route % args.top_k;
  const bool is_own = chunk.source == args.rank;
  args.row_origin[row] = {chunk.source, static_cast<std::int32_t>(token),
                          static_cast<std::int32_t>(k)};
  args.gather_index[row] = is_own ? -1 : gather_row;
  args.token_row_address[row] =
      is_own ? args.x + token * args.x_stride_bytes
             : args.frame->scratch.hidden_rows + gather_row * args.row_bytes;
  if (!combines_per_rank(args)) {
    args.result_row_address[row] =
        args.windows[chunk.source].combine + (token * args.top_k + k) * args.row_bytes;
  } else if (is_own) {
    args.sums.row_of_route[token * args.top_k + k] = row;
  } else {
    args.sums.rows[std::int64_t{gather_row} * args.top_k + k] = row;
  }
}

/// How many ranks below this one send the owner of a token a sum of it: those with a route of it.
__device__ inline int sums_before(const RouteArgs& args, const std::int32_t* ids, int source) {
  int num_sums = 0;
  for (int peer = 0; peer < args.rank; ++peer) {
    if (peer == source) continue;
    const auto begin = first_expert(args.num_experts, args.num_ranks, peer);
    const auto end = first_expert(args.num_experts, args.num_ranks, peer + 1);
    bool has_route = false;
    for (int k = 0; k < args.top_k; ++k) has_route = has_route || (ids[k] >= begin && ids[k] < end);
    num_sums += has_route ? 1 : 0;
  }
  return num_sums;
}

/// Combine per_rank: the sum of token `threadIdx.x` of the chunk, but for the rows of its routes.
__device__ inline void place_sum(const RouteArgs& args, const Chunk& chunk,
                                 const LocalExperts& local, std::int64_t gather_row) {
  const PeerWindows& owner = args.windows[chunk.source];
  const std::int64_t token = chunk.first_token + threadIdx.x;
  const std::int32_t* ids = chunk.ids + threadIdx.x * args.top_k;
  const float* scores = chunk.scores + threadIdx.x * args.top_k;
  args.sums.address[gather_row] = owner.combine + token * args.sums.bytes_per_token +
                                  sums_before(args, ids, chunk.source) * args.sums.row_bytes;
  for (int k = 0; k < args.top_k; ++k) {
    const std::int64_t at = gather_row * args.top_k + k;
    if (local.index(ids[k]) < 0) {
      args.sums.rows[at] = -1;
    } else {
      args.sums.scores[at] = scores[k];
    }
  }
}

/// What place_chunk() keeps in shared memory, beside the counts.
struct PlaceStorage {
  using Scan = cub::BlockScan<std::int32_t, kRouteChunkThreads>;
  std::int32_t gather_rows[kRouteChunkTokens];
  Scan::TempStorage scan;
};

/// Of a chunk; `counts` [kRouteChunkWarps, L] is shared memory. By the whole block.
__device__ inline void place_chunk(const RouteArgs& args, const Chunk& chunk, PlaceStorage& shared,
                                   std::uint16_t* counts) {
  if (chunk.num_tokens == 0) return;
  const LocalExperts local(args);

  if (chunk.source != args.rank) {
    const bool wanted = is_wanted(args, chunk, local);
    std::int32_t before = 0;
    PlaceStorage::Scan(shared.scan).ExclusiveSum(wanted ? 1 : 0, before);
    const std::int32_t gather_row = args.chunk_tokens[chunk.index] + before;
    shared.gather_rows[threadIdx.x] = gather_row;
    if (wanted && gather_row < args.gather_rows) {
      args.gather_source[gather_row] =
          args.windows[chunk.source].x + (chunk.first_token + threadIdx.x) * args.row_bytes;
      if (combines_per_rank(args)) place_sum(args, chunk, local, gather_row);
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < kRouteChunkWarps * local.count;
       i += kRouteChunkThreads) {
    counts[i] = 0;
  }
  __syncthreads();
  std::uint16_t* own_counts = counts + threadIdx.x / 32 * local.count;
  const WarpPart part(chunk.num_tokens * args.top_k, kRouteChunkThreads);
  const auto expert_of = [&](int route) { return local.index(chunk.ids[route]); };
  walk_routes(part, expert_of, own_counts, [](int, int, int) {});
  __syncthreads();
  sum_warp_counts(counts, local.count);
  __syncthreads();
  const std::int32_t* before_chunk =
      args.chunk_counts + static_cast<std::int64_t>(chunk.index) * args.num_experts + local.first;
  walk_routes(part, expert_of, own_counts, [&](int route, int expert, int before) {
    store_row(args, chunk, route, args.expert_begin[expert] + before_chunk[expert] + before,
              chunk.source == args.rank ? -1 : shared.gather_rows[route / args.top_k]);
  });
}

}  // namespace distmoe::cuda
