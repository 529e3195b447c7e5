// SPDX-License-Identifier: Apache-2.0
//
// The second pass of routing.cuh, by one block: whether the call goes on, and the tables that
// follow from how many rows each chunk has of each expert.
#pragma once

#include <cub/block/block_scan.cuh>

#include "backend/cuda/kernels/begin_call.cuh"
#include "backend/cuda/kernels/routing.cuh"
#include "backend/cuda/tile/token_tiling.hpp"
#include "plan/expert_partition.hpp"

namespace distmoe::cuda {

__device__ inline void fail(const RouteArgs& args, const FaultRecord& fault) {
  args.frame->failed = 1;
  args.frame->fault = fault;
}

/// The lowest rank that published an illegal id. The same on every rank.
__device__ inline void check_ids(const RouteArgs& args, const PublishedIds& published) {
  for (int rank = 0; rank < args.num_ranks; ++rank) {
    const PublishedHeader header = *published_header(published.of(rank));
    if (header.bad_route == kNoBadRoute) continue;
    if (header.bad_route == kRefusedCall) {
      fail(args, refusal_of(rank, header));
      return;
    }
    fail(args, {FaultKind::kBadExpertId, rank, header.bad_route, args.num_experts, header.bad_id});
    return;
  }
}

/// Whether a token of any rank names an expert twice. By the whole block.
__device__ inline bool has_duplicates(const RouteArgs& args, const PublishedIds& published) {
  bool found = false;
  for (int rank = 0; rank < args.num_ranks; ++rank) {
    const std::int32_t* ids = published_ids(published.of(rank));
    const std::int64_t num_tokens = published_header(published.of(rank))->num_tokens;
    for (std::int64_t token = threadIdx.x; token < num_tokens && !found; token += blockDim.x) {
      const std::int32_t* of_token = ids + token * args.top_k;
      for (int k = 1; k < args.top_k; ++k) {
        for (int before = 0; before < k; ++before) {
          found = found || (of_token[k] >= 0 && of_token[k] == of_token[before]);
        }
      }
    }
  }
  return __syncthreads_or(found) != 0;
}

/// The fullest rank, the lowest of equals, as on the CPU. By the whole block.
__device__ inline void check_capacity(const RouteArgs& args, const PublishedIds& published) {
  int fullest = 0;
  for (int rank = 1; rank < args.num_ranks; ++rank) {
    if (args.rows_per_rank[rank] > args.rows_per_rank[fullest]) fullest = rank;
  }
  const std::int64_t rows = args.rows_per_rank[fullest];
  if (rows <= args.capacity_rows) return;
  const std::int64_t duplicates = has_duplicates(args, published) ? 1 : 0;
  if (threadIdx.x != 0) return;
  fail(args, {FaultKind::kCapacityExceeded, fullest, duplicates, args.capacity_rows, rows});
}

/// chunk_counts[:, e] become the rows of e before the chunk, per expert, and totals leave. NOTE:
/// totals are counted in 64 bits, so that routes beyond 2^31 exceed the capacity instead of
/// wrapping into it; what wraps in a cell belongs to a call that fails.
__device__ inline void scan_chunks(const RouteArgs& args) {
  const int num_chunks = args.num_ranks * args.chunks_per_rank;
  for (int expert = static_cast<int>(threadIdx.x); expert < args.num_experts;
       expert += static_cast<int>(blockDim.x)) {
    std::int64_t before = 0;
#pragma unroll 8
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      std::int32_t* cell =
          &args.chunk_counts[static_cast<std::int64_t>(chunk) * args.num_experts + expert];
      const std::int32_t rows = *cell;
      *cell = static_cast<std::int32_t>(before);
      before += rows;
    }
    args.rows_per_expert[expert] = before;
  }
}

/// A warp a rank; by whole warps.
__device__ inline void sum_ranks(const RouteArgs& args) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int rank = static_cast<int>(threadIdx.x / 32); rank < args.num_ranks;
       rank += static_cast<int>(blockDim.x / 32)) {
    const auto begin = first_expert(args.num_experts, args.num_ranks, rank);
    const auto end = first_expert(args.num_experts, args.num_ranks, rank + 1);
    std::int64_t rows = 0;
    for (auto expert = begin + lane; expert < end; expert += 32) {
      rows += args.rows_per_expert[expert];
    }
    for (int distance = 16; distance > 0; distance /= 2) {
      rows += __shfl_xor_sync(~0u, rows, distance);
    }
    if (lane == 0) args.rows_per_rank[rank] = rows;
  }
}

/// What an expert adds to the tables: its rows, whether it has any, pairs of tiles.
struct ExpertSums {
  std::int32_t rows;
  std::int32_t groups;
  std::int32_t pairs;
};
__device__ inline ExpertSums operator+(const ExpertSums& a, const ExpertSums& b) {
  return {a.rows + b.rows, a.groups + b.groups, a.pairs + b.pairs};
}
struct AddExperts {
  __device__ ExpertSums operator()(const ExpertSums& a, const ExpertSums& b) const { return a + b; }
};

/// Scans over as many values as come, by a block of kThreads.
template <int kThreads>
class RouteScan {
 public:
  /// Exclusive sums of value(i), i < count, handed to store(i, sum); returns the total to all
  /// threads.
  template <typename Value, typename Store>
  __device__ std::int32_t operator()(int count, const Value& value, const Store& store) {
    std::int32_t before = 0;
    for (int begin = 0; begin < count; begin += kThreads) {
      const int i = begin + static_cast<int>(threadIdx.x);
      const std::int32_t mine = i < count ? value(i) : 0;
      std::int32_t sum = 0;
      std::int32_t total = 0;
      Scan(storage_.values).ExclusiveSum(mine, sum, total);
      if (i < count) store(i, before + sum);
      before += total;
      __syncthreads();
    }
    return before;
  }

  /// The same of experts.
  template <typename Value, typename Store>
  __device__ ExpertSums over_experts(int count, const Value& value, const Store& store) {
    ExpertSums before{};
    for (int begin = 0; begin < count; begin += kThreads) {
      const int i = begin + static_cast<int>(threadIdx.x);
      const ExpertSums mine = i < count ? value(i) : ExpertSums{};
      ExpertSums sum{};
      ExpertSums total{};
      ExpertScan(storage_.experts).ExclusiveScan(mine, sum, ExpertSums{}, AddExperts{}, total);
      if (i < count) store(i, before + sum);
      before = before + total;
      __syncthreads();
    }
    return before;
  }

 private:
  using Scan = cub::BlockScan<std::int32_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  using ExpertScan = cub::BlockScan<ExpertSums, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  union {
    typename Scan::TempStorage values;
    typename ExpertScan::TempStorage experts;
  } storage_;
};

/// The rows of one expert that come from ranks [first_rank, end_rank).
struct ExpertPart {
  std::int32_t begin;
  std::int32_t rows;

  __device__ ExpertPart(const RouteArgs& args, const LocalExperts& local, int expert,
                        int first_rank, int end_rank) {
    const auto before_rank = [&](int rank) {
      return rank == args.num_ranks
                 ? static_cast<std::int32_t>(args.rows_per_expert[local.first + expert])
                 : args.chunk_counts[static_cast<std::int64_t>(rank) * args.chunks_per_rank *
                                         args.num_experts +
                                     local.first + expert];
    };
    const std::int32_t from = before_rank(first_rank);
    begin = args.expert_begin[expert] + from;
    rows = before_rank(end_rank) - from;
  }
};

__device__ inline TileGroup tile_group(int expert, const ExpertPart& part, std::int32_t first_pair,
                                       bool needs_gather) {
  const TokenTiling tiling = token_tiling(part.rows);
  return {expert,
          part.begin,
          part.rows,
          first_pair,
          tiling.num_pairs,
          tiling.rows_per_tile,
          needs_gather ? 1 : 0,
          0};
}

/// Lists the groups of W13 part after part, those of all experts: own rows, which need not wait for
/// a link, then those of lower and of higher ranks.
template <int kThreads>
__device__ void list_parted_groups(const RouteArgs& args, const LocalExperts& local,
                                   RouteScan<kThreads>& scan) {
  TileGroup* groups = groups_of(args.groups, Product::kW13, local.count, args.num_ranks);
  const auto part_of = [&](int i) {
    const int part = i / local.count;
    const int expert = i % local.count;
    if (part == 0) return ExpertPart(args, local, expert, args.rank, args.rank + 1);
    const bool is_lower = part == 1;
    return ExpertPart(args, local, expert, is_lower ? 0 : args.rank + 1,
                      is_lower ? args.rank : args.num_ranks);
  };
  const auto num_parts = static_cast<int>(max_groups_per_expert(Product::kW13, args.num_ranks));
  const ExpertSums all = scan.over_experts(
      local.count * num_parts,
      [&](int i) {
        const std::int32_t rows = part_of(i).rows;
        return ExpertSums{rows, rows > 0 ? 1 : 0, token_tiling(rows).num_pairs};
      },
      [&](int i, const ExpertSums& before) {
        const ExpertPart part = part_of(i);
        if (part.rows == 0) return;
        groups[before.groups] = tile_group(i % local.count, part, before.pairs, i >= local.count);
      });
  if (threadIdx.x == 0) {
    args.frame->counts[static_cast<int>(Product::kW13)] = {all.groups, all.pairs};
  }
}

/// Rows of every expert and rank, and before each chunk. Whether the call goes on: it may fail
/// here, and all threads have read until now that it has not. By the whole block.
__device__ inline bool sum_rows(const RouteArgs& args, const PublishedIds& published) {
  __syncthreads();  // all have read it before one may write it
  if (threadIdx.x == 0) check_ids(args, published);
  scan_chunks(args);
  __syncthreads();
  sum_ranks(args);
  __syncthreads();
  const bool has_bad_id = args.frame->failed != 0;
  __syncthreads();
  if (!has_bad_id) check_capacity(args, published);
  __syncthreads();
  return args.frame->failed == 0;
}

/// First rows of the experts, and the groups of both products. By the whole block.
template <int kThreads>
__device__ void list_groups(const RouteArgs& args, std::int32_t num_gathered,
                            RouteScan<kThreads>& scan) {
  const LocalExperts local(args);
  const auto num_rows = static_cast<std::int32_t>(args.rows_per_rank[args.rank]);
  const bool is_parted =
      groups_per_expert(Product::kW13, args.num_ranks, local.count, num_rows) > 1;
  const auto groups_of_product = [&](Product product) {
    return groups_of(args.groups, product, local.count, args.num_ranks);
  };
  // W2 takes all rows of an expert together, W13 too where they are few.
  const ExpertSums all = scan.over_experts(
      local.count,
      [&](int i) {
        const auto rows = static_cast<std::int32_t>(args.rows_per_expert[local.first + i]);
        return ExpertSums{rows, rows > 0 ? 1 : 0, token_tiling(rows).num_pairs};
      },
      [&](int i, const ExpertSums& before) {
        args.expert_begin[i] = before.rows;
        const ExpertPart part(args, local, i, 0, args.num_ranks);
        if (part.rows == 0) return;
        groups_of_product(Product::kW2)[before.groups] = tile_group(i, part, before.pairs, false);
        if (is_parted) return;
        const ExpertPart own(args, local, i, args.rank, args.rank + 1);
        groups_of_product(Product::kW13)[before.groups] =
            tile_group(i, part, before.pairs, part.rows > own.rows);
      });
  if (threadIdx.x == 0) {
    args.expert_begin[local.count] = num_rows;
    args.frame->num_rows = num_rows;
    args.frame->num_gather_rows = num_gathered;
    args.frame->scratch = place_scratch(args.scratch, num_rows);
    for (const Product product : {Product::kW13, Product::kW2}) {
      args.frame->counts[static_cast<int>(product)] = {all.groups, all.pairs};
    }
    // Nobody waits for this one: no load.
    atomicMax(reinterpret_cast<long long*>(&args.state->peak_rows),
              static_cast<long long>(num_rows));
  }
  if (!is_parted) return;
  __syncthreads();
  list_parted_groups(args, local, scan);
}

/// The whole pass; `scan` is shared memory. By the whole block.
template <int kThreads>
__device__ void scan_counts(const RouteArgs& args, const PublishedIds& published,
                            RouteScan<kThreads>& scan) {
  if (!sum_rows(args, published)) return;
  const std::int32_t num_gathered = scan(
      args.num_ranks * args.chunks_per_rank, [&](int i) { return args.chunk_tokens[i]; },
      [&](int i, std::int32_t before) { args.chunk_tokens[i] = before; });
  list_groups(args, num_gathered, scan);
}

}  // namespace distmoe::cuda
