// SPDX-License-Identifier: Apache-2.0
//
// Routing in three passes over chunks of 256 tokens of one source rank. Chunks are numbered by
// source, then token, so that rows before a chunk are rows of lower sources and earlier tokens.
//
//   count  chunk_counts[chunk, e] = routes of the chunk to expert e, for all E, so that every rank
//          knows every rank's load; chunk_tokens[chunk] = tokens that this rank must gather.
//
//   scan   one block: counts become rows before the chunk; row totals, faults, expert_begin and
//          groups.
//
//   place  every route of this rank's experts finds its row: expert_begin + rows before the chunk +
//          rows before it in the chunk, counted per warp in route order with match_any. With
//          combine per_rank also what each sum of a peer's token is made of and where it goes.
//
// Nothing depends on timing: the only atomics are commutative counts.
//
// Kernels of their own make the passes (route.cu), or one block of a call of few tokens does, one
// after the other (publish_route.cu).
#pragma once

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "backend/cuda/kernels/begin_call.cuh"
#include "backend/cuda/kernels/route.hpp"
#include "backend/cuda/tile/token_tiling.hpp"
#include "plan/expert_partition.hpp"

namespace distmoe::cuda {

static_assert(kRouteChunkThreads == kRouteChunkTokens, "a thread looks at one token of the chunk");

/// Where the routing reads what ranks published: in their windows, or in copies of those.
struct PublishedIds {
  const PeerWindows* windows;   ///< [P]
  const unsigned char* copies;  ///< [P] id windows, each copy_bytes; null: none
  std::int32_t copy_bytes;

  __device__ explicit PublishedIds(const RouteArgs& args)
      : windows(args.windows), copies(nullptr), copy_bytes(0) {}
  __device__ PublishedIds(const unsigned char* copies, std::int32_t copy_bytes)
      : windows(nullptr), copies(copies), copy_bytes(copy_bytes) {}
  /// An address as of PeerWindows::ids; a copy has scores where this rank needs them.
  __device__ std::uint64_t of(int rank) const {
    if (copies == nullptr) return windows[rank].ids;
    return reinterpret_cast<std::uint64_t>(copies + std::int64_t{rank} * copy_bytes);
  }
};

/// The part of a source's tokens that a block handles at a time.
struct Chunk {
  int index;
  int source;
  std::int64_t first_token;
  int num_tokens;
  const std::int32_t* ids;  ///< of first_token
  const float* scores;      ///< likewise, where ranks publish them

  __device__ Chunk(const RouteArgs& args, const PublishedIds& published, int chunk)
      : Chunk(args, published, chunk, chunk / args.chunks_per_rank,
              chunk % args.chunks_per_rank * kRouteChunkTokens) {}
  __device__ Chunk(const RouteArgs& args, const PublishedIds& published, int chunk, int source,
                   std::int64_t first_token)
      : index(chunk), source(source), first_token(first_token) {
    const std::uint64_t window = published.of(source);
    const std::int64_t left = published_header(window)->num_tokens - first_token;
    num_tokens = static_cast<int>(min(max(left, std::int64_t{0}), std::int64_t{kRouteChunkTokens}));
    ids = published_ids(window) + first_token * args.top_k;
    scores =
        reinterpret_cast<const float*>(window + args.sums.score_offset) + first_token * args.top_k;
  }
};

struct LocalExperts {
  int first;
  int count;
  __device__ explicit LocalExperts(const RouteArgs& args)
      : first(args.first_local_expert), count(args.num_local_experts) {}
  /// Local index, or -1.
  __device__ int index(std::int32_t id) const {
    return id >= first && id < first + count ? id - first : -1;
  }
};

/// Whether this rank computes a route of token `threadIdx.x` of the chunk.
__device__ inline bool is_wanted(const RouteArgs& args, const Chunk& chunk,
                                 const LocalExperts& local) {
  if (static_cast<int>(threadIdx.x) >= chunk.num_tokens) return false;
  bool wanted = false;
  for (int k = 0; k < args.top_k; ++k) {
    wanted = wanted || local.index(chunk.ids[threadIdx.x * args.top_k + k]) >= 0;
  }
  return wanted;
}

/// The first pass; `counts` [E] is shared memory.
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

/// The second pass; `scan` is shared memory.
template <int kThreads>
__device__ void scan_counts(const RouteArgs& args, const PublishedIds& published,
                            RouteScan<kThreads>& scan) {
  if (!sum_rows(args, published)) return;
  const std::int32_t num_gathered = scan(
      args.num_ranks * args.chunks_per_rank, [&](int i) { return args.chunk_tokens[i]; },
      [&](int i, std::int32_t before) { args.chunk_tokens[i] = before; });
  list_groups(args, num_gathered, scan);
}

/// A warp's part of `num_routes`, contiguous, so that the warps of a block of `num_threads` follow
/// each other in route order.
struct WarpPart {
  int begin;
  int end;
  __device__ WarpPart(int num_routes, int warp, int num_threads) {
    const int per_warp = (num_routes + num_threads - 1) / num_threads * 32;
    begin = min(num_routes, warp * per_warp);
    end = min(num_routes, begin + per_warp);
  }
};

/// Walks a warp's routes in order: use(route, expert, rows of the expert before it) for those that
/// expert_of() gives an expert >= 0. `before` counts them.
template <typename ExpertOf, typename Use>
__device__ void walk_warp_part(const WarpPart& part, const ExpertOf& expert_of,
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

/// counts[warp, expert] become those of the warps before. By a block.
__device__ inline void sum_warp_counts(std::uint16_t* counts, int num_warps, int num_local,
                                       int num_threads) {
  for (int expert = static_cast<int>(threadIdx.x); expert < num_local; expert += num_threads) {
    int before = 0;
    for (int warp = 0; warp < num_warps; ++warp) {
      std::uint16_t& count = counts[warp * num_local + expert];
      const int rows = count;
      count = static_cast<std::uint16_t>(before);
      before += rows;
    }
  }
}

__device__ inline bool combines_per_rank(const RouteArgs& args) {
  return args.sums.row_of_route != nullptr;
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
  args.token_row_address[row] = is_own ? args.x + token * args.x_stride_bytes
                                       : args.gather_buffer + gather_row * args.row_bytes;
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

/// Combine per_rank: the sum of a token of the chunk, but for the rows of its routes.
__device__ inline void place_sum(const RouteArgs& args, const Chunk& chunk,
                                 const LocalExperts& local, int index, std::int64_t gather_row) {
  const PeerWindows& owner = args.windows[chunk.source];
  const std::int64_t token = chunk.first_token + index;
  const std::int32_t* ids = chunk.ids + index * args.top_k;
  const float* scores = chunk.scores + index * args.top_k;
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

/// The third pass; `counts` [kRouteChunkWarps, L] is shared memory.
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
      if (combines_per_rank(args)) {
        place_sum(args, chunk, local, static_cast<int>(threadIdx.x), gather_row);
      }
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < kRouteChunkWarps * local.count;
       i += kRouteChunkThreads) {
    counts[i] = 0;
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  std::uint16_t* own_counts = counts + warp * local.count;
  const WarpPart part(chunk.num_tokens * args.top_k, warp, kRouteChunkThreads);
  const auto expert_of = [&](int route) { return local.index(chunk.ids[route]); };
  walk_warp_part(part, expert_of, own_counts, [](int, int, int) {});
  __syncthreads();
  sum_warp_counts(counts, kRouteChunkWarps, local.count, kRouteChunkThreads);
  __syncthreads();
  const std::int32_t* before_chunk =
      args.chunk_counts + static_cast<std::int64_t>(chunk.index) * args.num_experts + local.first;
  walk_warp_part(part, expert_of, own_counts, [&](int route, int expert, int before) {
    store_row(args, chunk, route, args.expert_begin[expert] + before_chunk[expert] + before,
              chunk.source == args.rank ? -1 : shared.gather_rows[route / args.top_k]);
  });
}

}  // namespace distmoe::cuda
