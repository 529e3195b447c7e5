// SPDX-License-Identifier: Apache-2.0
//
// The routing of a call of few rows, by every block for itself in shared memory: what the blocks
// would otherwise wait for costs more. Rows are ordered as route.cu orders them:
// by expert, then token, then k.
#pragma once

#include <cub/block/block_scan.cuh>

#include <cstdint>

#include "backend/cuda/kernels/expert_id.cuh"
#include "backend/cuda/kernels/score.cuh"
#include "backend/cuda/kernels/sm90_bf16_few_rows.hpp"
#include "backend/cuda/tile/tile_scheduler.cuh"
#include "backend/cuda/tile/warp_routes.cuh"

namespace distmoe::cuda {

inline constexpr int kFewWarps = kGemmThreads / 32;
inline constexpr std::int32_t kNoFewBadRoute = INT32_MAX;

/// A thread's routes on their way from the caller's tensors to shared memory.
class FewRowsLoad {
 public:
  __device__ __forceinline__ explicit FewRowsLoad(const FewRowsArgs& args) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int route = route_at(i);
      if (route >= args.num_tokens * args.top_k) continue;
      id_[i] = load_id(args, route);
      score_[i] = load_score(args, route / args.top_k, route % args.top_k);
    }
  }

  /// An illegal id becomes -1, and the first one is noted.
  __device__ __forceinline__ void store(const FewRowsArgs& args, FewRowsTables& tables,
                                        FewRowsRoutingScratch& scratch) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int route = route_at(i);
      if (route >= args.num_tokens * args.top_k) continue;
      const bool is_legal = id_[i] >= -1 && id_[i] < args.num_experts;
      scratch.id_of_route[route] = is_legal ? static_cast<std::int16_t>(id_[i]) : -1;
      if (!is_legal || id_[i] < 0) tables.row_of_route[route] = FewRowsTables::kNoRow;
      if (!is_legal) atomicMin(&tables.bad_route, route);
      tables.scores[route] = score_[i];
    }
  }

 private:
  static constexpr int kPerThread = (kFewRoutes + kGemmThreads - 1) / kGemmThreads;
  static __device__ __forceinline__ int route_at(int i) {
    return static_cast<int>(threadIdx.x) + i * kGemmThreads;
  }

  std::int64_t id_[kPerThread];
  float score_[kPerThread];
};

/// Rows, tiles of token rows and groups in one word, so that one scan adds up all three.
struct FewRowsSums {
  static constexpr int kTiles = 32;
  static constexpr int kGroups = 54;
  static __device__ __forceinline__ std::uint64_t of(int rows, int tiles) {
    return static_cast<std::uint64_t>(rows) | static_cast<std::uint64_t>(tiles) << kTiles |
           std::uint64_t{rows > 0 ? 1u : 0u} << kGroups;
  }
  static __device__ __forceinline__ std::uint32_t rows(std::uint64_t sums) {
    return static_cast<std::uint32_t>(sums);
  }
  static __device__ __forceinline__ std::uint32_t tiles(std::uint64_t sums) {
    return static_cast<std::uint32_t>(sums >> kTiles) & ((1u << (kGroups - kTiles)) - 1);
  }
  static __device__ __forceinline__ std::uint32_t groups(std::uint64_t sums) {
    return static_cast<std::uint32_t>(sums >> kGroups);
  }
};

/// Lists the experts that have rows, of which a thread has kExpertsPerThread in order, and returns
/// the rows before each. By all threads of a block.
inline constexpr int kExpertsPerThread = (kFewExperts + kGemmThreads - 1) / kGemmThreads;
struct FewRowsOfThread {
  int expert[kExpertsPerThread];
  int rows[kExpertsPerThread];  ///< 0: none, or no such expert
  std::uint32_t before[kExpertsPerThread];
};
__device__ __forceinline__ void list_few_groups(const FewRowsArgs& args, FewRowsOfThread& experts,
                                                FewRowsTables& tables) {
  using Scan = cub::BlockScan<std::uint64_t, kGemmThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Scan::TempStorage scan_storage;
  std::uint64_t sums[kExpertsPerThread];
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    const int rows = experts.rows[i];
    sums[i] = FewRowsSums::of(rows, (rows + args.tiles.tokens - 1) / args.tiles.tokens);
  }
  std::uint64_t total = 0;
  Scan(scan_storage).ExclusiveSum(sums, sums, total);
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    experts.before[i] = FewRowsSums::rows(sums[i]);
    if (experts.rows[i] == 0) continue;
    tables.groups[FewRowsSums::groups(sums[i])] = {experts.before[i],
                                                   static_cast<std::uint32_t>(experts.expert[i]),
                                                   FewRowsSums::tiles(sums[i])};
  }
  if (threadIdx.x != 0) return;
  tables.num_rows = static_cast<std::int32_t>(FewRowsSums::rows(total));
  tables.num_groups = static_cast<std::int32_t>(FewRowsSums::groups(total));
  tables.num_tiles = static_cast<std::int32_t>(FewRowsSums::tiles(total));
  tables.groups[FewRowsSums::groups(total)] = {FewRowsSums::rows(total), 0,
                                               FewRowsSums::tiles(total)};
}

/// Rows of each expert before each warp's part, offsets of the experts and the groups.
__device__ __forceinline__ void place_experts(const FewRowsArgs& args, FewRowsTables& tables,
                                              FewRowsRoutingScratch& scratch) {
  FewRowsOfThread experts;
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    const int expert = static_cast<int>(threadIdx.x) * kExpertsPerThread + i;
    experts.expert[i] = expert;
    experts.rows[i] = 0;
    if (expert >= args.num_experts) continue;
#pragma unroll
    for (int warp = 0; warp < kFewWarps; ++warp) {
      const int count = scratch.before[warp][expert];
      scratch.before[warp][expert] = static_cast<std::uint16_t>(experts.rows[i]);
      experts.rows[i] += count;
    }
  }
  list_few_groups(args, experts, tables);
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    if (experts.expert[i] >= args.num_experts) continue;
    scratch.expert_begin[experts.expert[i]] = static_cast<std::uint16_t>(experts.before[i]);
  }
}

/// Fills the tables of a call of at most 32 routes, a lane each; by one warp. NOTE: at one token
/// the barriers of the other way would be 1 of 25 us.
__device__ __forceinline__ void route_in_a_warp(const FewRowsArgs& args, FewRowsTables& tables) {
  const int num_routes = args.num_tokens * args.top_k;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::int64_t given = -1;
  if (lane < num_routes) {
    given = load_id(args, lane);
    tables.scores[lane] = load_score(args, lane / args.top_k, lane % args.top_k);
  }
  const bool is_legal = given >= -1 && given < args.num_experts;
  const int expert = is_legal ? static_cast<int>(given) : -1;
  const unsigned bad = __ballot_sync(kAllLanes, !is_legal);
  // Rows, groups and tiles of token rows before this route's.
  const unsigned same = __match_any_sync(kAllLanes, expert);
  const bool is_first = expert >= 0 && lane == __ffs(static_cast<int>(same)) - 1;
  const unsigned rows = __ballot_sync(kAllLanes, expert >= 0);
  const int tiles = is_first ? (__popc(same) + args.tiles.tokens - 1) / args.tiles.tokens : 0;
  int row = __popc(same & ((1u << lane) - 1));
  int group = 0;
  int tile = 0;
  for (int other = 0; other < num_routes; ++other) {
    const int others_expert = __shfl_sync(kAllLanes, expert, other);
    const int others_tiles = __shfl_sync(kAllLanes, tiles, other);
    if (others_expert < 0 || others_expert >= expert) continue;
    ++row;
    group += others_tiles > 0 ? 1 : 0;
    tile += others_tiles;
  }
  if (lane < num_routes) {
    tables.row_of_route[lane] =
        expert >= 0 ? static_cast<std::uint16_t>(row) : FewRowsTables::kNoRow;
  }
  if (expert >= 0) tables.route_of_row[row] = static_cast<std::uint16_t>(lane);
  if (expert >= 0 && row < kOneTokenRoutes) {
    tables.expert_of_row[row] = static_cast<std::uint16_t>(expert);
  }
  if (is_first) {
    tables.groups[group] = {static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(expert),
                            static_cast<std::uint32_t>(tile)};
  }
  const int num_groups = __popc(__ballot_sync(kAllLanes, is_first));
  const int num_tiles = __reduce_add_sync(kAllLanes, tiles);
  if (lane < args.num_tokens) {
    const unsigned of_token = args.top_k == 32 ? kAllLanes : (1u << args.top_k) - 1;
    tables.routes_of_token[lane] =
        static_cast<std::uint16_t>(__popc(rows >> (lane * args.top_k) & of_token));
  }
  if (lane == 0) {
    tables.num_rows = __popc(rows);
    tables.num_groups = num_groups;
    tables.num_tiles = num_tiles;
    tables.groups[num_groups] = {static_cast<std::uint32_t>(__popc(rows)), 0,
                                 static_cast<std::uint32_t>(num_tiles)};
    tables.bad_route = bad == 0 ? kNoFewBadRoute : __ffs(static_cast<int>(bad)) - 1;
  }
}

/// Fills the tables; by all threads of a block.
__device__ __forceinline__ void route_in_a_block(const FewRowsArgs& args, FewRowsTables& tables,
                                                 FewRowsRoutingScratch& scratch) {
  const FewRowsLoad load(args);
  const int num_routes = args.num_tokens * args.top_k;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint16_t* before = scratch.before[threadIdx.x / 32];
  for (int expert = lane; expert < args.num_experts; expert += 32) before[expert] = 0;
  if (threadIdx.x == 0) tables.bad_route = kNoFewBadRoute;
  __syncthreads();
  load.store(args, tables, scratch);
  __syncthreads();
  const WarpPart part(num_routes, kGemmThreads);
  const auto expert_of = [&](int route) { return int{scratch.id_of_route[route]}; };
  walk_routes(part, expert_of, before, [](int, int, int) {});
  __syncthreads();
  place_experts(args, tables, scratch);
  __syncthreads();
  walk_routes(part, expert_of, before, [&](int route, int expert, int before_it) {
    const int row = scratch.expert_begin[expert] + before_it;
    tables.route_of_row[row] = static_cast<std::uint16_t>(route);
    tables.row_of_route[route] = static_cast<std::uint16_t>(row);
  });
  for (int token = static_cast<int>(threadIdx.x); token < args.num_tokens; token += kGemmThreads) {
    int routes = 0;
    for (int k = 0; k < args.top_k; ++k) {
      routes += scratch.id_of_route[token * args.top_k + k] >= 0 ? 1 : 0;
    }
    tables.routes_of_token[token] = static_cast<std::uint16_t>(routes);
  }
}

/// Fills the tables; by all threads of a block, which have earlier kernels behind them. A barrier
/// follows.
__device__ __forceinline__ void route_few_rows(const FewRowsArgs& args, FewRowsTables& tables,
                                               FewRowsRoutingScratch& scratch) {
  if (args.num_tokens * args.top_k > 32) {
    route_in_a_block(args, tables, scratch);
  } else if (threadIdx.x < 32) {
    route_in_a_warp(args, tables);
  }
}

/// With peers the routing kernels have listed the rows of each expert, none of a failed call. By
/// all threads of a block, a barrier follows.
__device__ __forceinline__ void read_few_groups(const FewRowsArgs& args, FewRowsTables& tables) {
  const int num_groups = args.frame->counts[static_cast<int>(Product::kW2)].num_groups;
  FewRowsOfThread experts;
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    const int group = static_cast<int>(threadIdx.x) * kExpertsPerThread + i;
    experts.rows[i] = 0;
    if (group >= num_groups) continue;
    experts.expert[i] = args.w2.groups[group].expert;
    experts.rows[i] = args.w2.groups[group].num_rows;
  }
  list_few_groups(args, experts, tables);
}

/// The first row of an expert or, where it has none, of the experts after it.
__device__ __forceinline__ int first_row(const FewRowsTables& tables, int expert) {
  int begin = 0;
  int end = tables.num_groups;
  while (begin < end) {
    const int middle = (begin + end) / 2;
    if (static_cast<int>(tables.groups[middle].expert) < expert) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return static_cast<int>(tables.groups[begin].row_begin);
}

/// Whether a token names an expert twice. By one thread: only a call that fails asks.
__device__ inline bool names_an_expert_twice(const FewRowsArgs& args, const FewRowsTables& tables) {
  for (int row = 1; row < tables.num_rows; ++row) {
    // Rows of an expert stand in the order of their tokens.
    const int token = tables.route_of_row[row] / args.top_k;
    if (token != tables.route_of_row[row - 1] / args.top_k) continue;
    const std::int64_t expert = load_id(args, tables.route_of_row[row]);
    if (expert == load_id(args, tables.route_of_row[row - 1])) return true;
  }
  return false;
}

/// The fault of the call, as route.cu finds it.
__device__ inline FaultRecord few_rows_fault(const FewRowsArgs& args, const FewRowsTables& tables) {
  if (tables.bad_route != kNoFewBadRoute) {
    return {FaultKind::kBadExpertId, 0, tables.bad_route, args.num_experts,
            load_id(args, tables.bad_route)};
  }
  return {FaultKind::kCapacityExceeded, 0, names_an_expert_twice(args, tables) ? 1 : 0,
          args.capacity_rows, tables.num_rows};
}

__device__ __forceinline__ bool has_failed(const FewRowsArgs& args, const FewRowsTables& tables) {
  return tables.bad_route != kNoFewBadRoute || tables.num_rows > args.capacity_rows;
}

/// Writes the tables that the host reads; by `num_threads` threads, of which this is `thread`.
__device__ inline void record_routing(const FewRowsArgs& args, const FewRowsTables& tables,
                                      int thread, int num_threads) {
  const RoutingRecord& record = args.record;
  for (int expert = thread; expert < args.num_experts; expert += num_threads) {
    const std::int32_t begin = first_row(tables, expert);
    record.expert_begin[expert] = begin;
    record.rows_per_expert[expert] = first_row(tables, expert + 1) - begin;
  }
  if (thread == 0) {
    record.expert_begin[args.num_experts] = tables.num_rows;
    record.rows_per_rank[0] = tables.num_rows;
  }
  if (has_failed(args, tables)) return;
  for (int row = thread; row < tables.num_rows; row += num_threads) {
    const int route = tables.route_of_row[row];
    const int token = route / args.top_k;
    record.row_origin[row] = {0, token, route % args.top_k};
    record.token_row_address[row] = args.x + token * args.x_stride_bytes;
  }
}

}  // namespace distmoe::cuda
