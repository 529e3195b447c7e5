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
  /// An address as of PeerWindows::ids, but for the scores.
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

  __device__ Chunk(const RouteArgs& args, const PublishedIds& published, int chunk)
      : index(chunk),
        source(chunk / args.chunks_per_rank),
        first_token(std::int64_t{chunk % args.chunks_per_rank} * kRouteChunkTokens) {
    const std::uint64_t window = published.of(source);
    const std::int64_t left = published_header(window)->num_tokens - first_token;
    num_tokens = static_cast<int>(min(max(left, std::int64_t{0}), std::int64_t{kRouteChunkTokens}));
    ids = published_ids(window) + first_token * args.top_k;
  }
};

struct LocalExperts {
  int first;
  int count;
  __device__ explicit LocalExperts(const RouteArgs& args)
      : first(static_cast<int>(first_expert(args.num_experts, args.num_ranks, args.rank))),
        count(static_cast<int>(num_local_experts(args.num_experts, args.num_ranks, args.rank))) {}
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
      fail(args, {FaultKind::kRefusedByPeer, rank, 0, 0, 0});
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

__device__ inline void sum_ranks(const RouteArgs& args) {
  for (int rank = static_cast<int>(threadIdx.x); rank < args.num_ranks;
       rank += static_cast<int>(blockDim.x)) {
    const auto begin = first_expert(args.num_experts, args.num_ranks, rank);
    const auto end = first_expert(args.num_experts, args.num_ranks, rank + 1);
    std::int64_t rows = 0;
    for (auto expert = begin; expert < end; ++expert) rows += args.rows_per_expert[expert];
    args.rows_per_rank[rank] = rows;
  }
}

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
      Scan(storage_).ExclusiveSum(mine, sum, total);
      if (i < count) store(i, before + sum);
      before += total;
      __syncthreads();
    }
    return before;
  }

 private:
  using Scan = cub::BlockScan<std::int32_t, kThreads>;
  typename Scan::TempStorage storage_;
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

/// Lists the groups of a product: part after part, those of all experts.
template <int kThreads>
__device__ void list_groups(const RouteArgs& args, const LocalExperts& local, Product product,
                            std::int32_t num_rows, RouteScan<kThreads>& scan) {
  TileGroup* groups = groups_of(args.groups, product, local.count, args.num_ranks);
  // Of several parts, own rows come first, which need not wait for a link.
  const int num_parts =
      static_cast<int>(groups_per_expert(product, args.num_ranks, local.count, num_rows));
  const auto own_part = [&](int expert) {
    return ExpertPart(args, local, expert, args.rank, args.rank + 1);
  };
  const auto part_of = [&](int i) {
    const int expert = i % local.count;
    if (num_parts == 1) return ExpertPart(args, local, expert, 0, args.num_ranks);
    const int part = i / local.count;
    if (part == 0) return own_part(expert);
    const bool is_lower = part == 1;
    return ExpertPart(args, local, expert, is_lower ? 0 : args.rank + 1,
                      is_lower ? args.rank : args.num_ranks);
  };
  // First the places of the non-empty groups, then, in a second scan, the pairs before each.
  const std::int32_t num_groups = scan(
      local.count * num_parts, [&](int i) { return part_of(i).rows > 0 ? 1 : 0; },
      [&](int i, std::int32_t place) {
        const ExpertPart part = part_of(i);
        if (part.rows == 0) return;
        const int expert = i % local.count;
        const TokenTiling tiling = token_tiling(part.rows);
        const bool has_pulled_rows =
            num_parts == 1 ? part.rows > own_part(expert).rows : i >= local.count;
        groups[place] = {expert,
                         part.begin,
                         part.rows,
                         0,
                         tiling.num_pairs,
                         tiling.rows_per_tile,
                         product == Product::kW13 && has_pulled_rows ? 1 : 0,
                         0};
      });
  const std::int32_t num_pairs = scan(
      num_groups, [&](int i) { return groups[i].num_pairs; },
      [&](int i, std::int32_t before) { groups[i].first_pair = before; });
  if (threadIdx.x == 0) args.frame->counts[static_cast<int>(product)] = {num_groups, num_pairs};
}

/// The second pass; `scan` is shared memory. The call may fail here: all threads have read until
/// now that it has not.
template <int kThreads>
__device__ void scan_counts(const RouteArgs& args, const PublishedIds& published,
                            RouteScan<kThreads>& scan) {
  __syncthreads();  // all have read it before one may write it
  const LocalExperts local(args);
  if (threadIdx.x == 0) check_ids(args, published);
  scan_chunks(args);
  __syncthreads();
  sum_ranks(args);
  __syncthreads();
  const bool has_bad_id = args.frame->failed != 0;
  __syncthreads();
  if (!has_bad_id) check_capacity(args, published);
  __syncthreads();
  if (args.frame->failed != 0) return;

  const std::int32_t num_rows = scan(
      local.count,
      [&](int i) { return static_cast<std::int32_t>(args.rows_per_expert[local.first + i]); },
      [&](int i, std::int32_t before) { args.expert_begin[i] = before; });
  const std::int32_t num_gathered = scan(
      args.num_ranks * args.chunks_per_rank, [&](int i) { return args.chunk_tokens[i]; },
      [&](int i, std::int32_t before) { args.chunk_tokens[i] = before; });
  if (threadIdx.x == 0) {
    args.expert_begin[local.count] = num_rows;
    args.frame->num_rows = num_rows;
    args.state->peak_rows = max(args.state->peak_rows, std::int64_t{num_rows});
    args.frame->num_gather_rows = num_gathered;
  }
  __syncthreads();
  list_groups(args, local, Product::kW13, num_rows, scan);
  list_groups(args, local, Product::kW2, num_rows, scan);
}

/// What place() keeps in shared memory: rows of each local expert before each warp's part of the
/// chunk.
struct PlaceCounts {
  std::uint16_t* before;  ///< [kRouteChunkWarps, L]
  int num_local;
  __device__ std::uint16_t& at(int warp, int expert) const {
    return before[warp * num_local + expert];
  }
};

/// A warp's part of the chunk's routes: contiguous, so that warps follow each other in route order.
struct WarpPart {
  int begin;
  int end;
  __device__ WarpPart(int num_routes, int warp) {
    const int per_warp = (num_routes + kRouteChunkThreads - 1) / kRouteChunkThreads * 32;
    begin = min(num_routes, warp * per_warp);
    end = min(num_routes, begin + per_warp);
  }
};

__device__ inline void count_per_warp(const Chunk& chunk, const LocalExperts& local, int top_k,
                                      const PlaceCounts& counts) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = static_cast<int>(threadIdx.x); i < kRouteChunkWarps * local.count;
       i += kRouteChunkThreads) {
    counts.before[i] = 0;
  }
  __syncthreads();
  const WarpPart part(chunk.num_tokens * top_k, warp);
  for (int base = part.begin; base < part.end; base += 32) {
    const int route = base + lane;
    const int expert = route < part.end ? local.index(chunk.ids[route]) : -1;
    const unsigned same = __match_any_sync(~0u, expert);
    if (expert >= 0 && lane == __ffs(static_cast<int>(same)) - 1) {
      counts.at(warp, expert) = static_cast<std::uint16_t>(counts.at(warp, expert) + __popc(same));
    }
    __syncwarp();
  }
  __syncthreads();
  for (int expert = static_cast<int>(threadIdx.x); expert < local.count;
       expert += kRouteChunkThreads) {
    int before = 0;
    for (int w = 0; w < kRouteChunkWarps; ++w) {
      const int rows = counts.at(w, expert);
      counts.at(w, expert) = static_cast<std::uint16_t>(before);
      before += rows;
    }
  }
  __syncthreads();
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

/// Combine per_rank: the sum of token `threadIdx.x` of the chunk, but for the rows of its routes.
__device__ inline void place_sum(const RouteArgs& args, const Chunk& chunk,
                                 const LocalExperts& local, std::int64_t gather_row) {
  const PeerWindows& owner = args.windows[chunk.source];
  const std::int64_t token = chunk.first_token + threadIdx.x;
  const std::int32_t* ids = chunk.ids + threadIdx.x * args.top_k;
  const auto* scores =
      reinterpret_cast<const float*>(owner.ids + args.sums.score_offset) + token * args.top_k;
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

/// The third pass; `counts_storage` [kRouteChunkWarps, L] is shared memory.
__device__ inline void place_chunk(const RouteArgs& args, const Chunk& chunk, PlaceStorage& shared,
                                   std::uint16_t* counts_storage) {
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
  const PlaceCounts counts{counts_storage, local.count};
  count_per_warp(chunk, local, args.top_k, counts);

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int32_t* before_chunk =
      args.chunk_counts + static_cast<std::int64_t>(chunk.index) * args.num_experts + local.first;
  const WarpPart part(chunk.num_tokens * args.top_k, warp);
  for (int base = part.begin; base < part.end; base += 32) {
    const int route = base + lane;
    const int expert = route < part.end ? local.index(chunk.ids[route]) : -1;
    const unsigned same = __match_any_sync(~0u, expert);
    if (expert >= 0) {
      const int rank_in_warp = __popc(same & ((1u << lane) - 1));
      const std::int32_t row =
          args.expert_begin[expert] + before_chunk[expert] + counts.at(warp, expert) + rank_in_warp;
      store_row(args, chunk, route, row,
                chunk.source == args.rank ? -1 : shared.gather_rows[route / args.top_k]);
    }
    __syncwarp();
    if (expert >= 0 && lane == __ffs(static_cast<int>(same)) - 1) {
      counts.at(warp, expert) = static_cast<std::uint16_t>(counts.at(warp, expert) + __popc(same));
    }
    __syncwarp();
  }
}

}  // namespace distmoe::cuda
