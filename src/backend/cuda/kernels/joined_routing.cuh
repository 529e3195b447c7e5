// SPDX-License-Identifier: Apache-2.0
//
// The routing of a call of few tokens by one block, with the ids of all ranks and its tables in
// shared memory. What routing.cuh does chunk after chunk is done here for all ranks' tokens at
// once, one after the other as if they were one chunk: the same rows in the same order.
#pragma once

#include "backend/cuda/kernels/routing.cuh"
#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {

static_assert(kJoinedThreads == 1024, "a warp for each of as many partial counts of an expert");
inline constexpr int kJoinedWarps = kJoinedThreads / 32;

/// All tokens of a rank, which are one chunk.
__device__ inline Chunk tokens_of_rank(const RouteArgs& args, const PublishedIds& published,
                                       int rank) {
  return {args, published, rank, rank, 0};
}

/// The tokens of all ranks in one row: those of rank r are [first_token[r], first_token[r + 1]).
struct JoinedTokens {
  std::int32_t first_token[kMostJoinedRanks + 1];

  /// By one thread.
  __device__ void list(const RouteArgs& args, const PublishedIds& published) {
    first_token[0] = 0;
    for (int rank = 0; rank < args.num_ranks; ++rank) {
      first_token[rank + 1] = first_token[rank] + tokens_of_rank(args, published, rank).num_tokens;
    }
  }
  __device__ int rank_of(int token) const {
    int rank = 0;
    while (token >= first_token[rank + 1]) ++rank;
    return rank;
  }
};

/// A token of any rank.
struct JoinedToken {
  int rank;
  int index;                ///< among the tokens of its rank
  const std::int32_t* ids;  ///< [K]

  __device__ JoinedToken(const RouteArgs& args, const PublishedIds& published,
                         const JoinedTokens& tokens, int token)
      : rank(tokens.rank_of(token)), index(token - tokens.first_token[rank]) {
    ids = published_ids(published.of(rank)) + index * args.top_k;
  }
};

/// What the block keeps in shared memory beside the tables of RouteArgs.
struct JoinedStorage {
  RouteScan<kJoinedThreads> scan;
  JoinedTokens tokens;
};

/// rows[rank, e] of all ranks. By the whole block.
__device__ inline void count_joined(const RouteArgs& args, const PublishedIds& published,
                                    const JoinedTokens& tokens) {
  const int num_routes = tokens.first_token[args.num_ranks] * args.top_k;
  for (int route = static_cast<int>(threadIdx.x); route < num_routes; route += kJoinedThreads) {
    const int index = route / args.top_k;
    const JoinedToken token(args, published, tokens, index);
    const std::int32_t id = token.ids[route - index * args.top_k];
    if (id < 0 || id >= args.num_experts) continue;
    atomicAdd(&args.chunk_counts[token.rank * args.num_experts + id], 1);
  }
}

/// gather_rows[token] of all tokens that peers send here; returns how many.
__device__ inline std::int32_t place_gathered(const RouteArgs& args, const PublishedIds& published,
                                              JoinedStorage& storage, std::int32_t* gather_rows) {
  const LocalExperts local(args);
  const auto is_gathered = [&](int index) {
    const JoinedToken token(args, published, storage.tokens, index);
    if (token.rank == args.rank) return 0;
    for (int k = 0; k < args.top_k; ++k) {
      if (local.index(token.ids[k]) >= 0) return 1;
    }
    return 0;
  };
  return storage.scan(storage.tokens.first_token[args.num_ranks], is_gathered,
                      [&](int index, std::int32_t row) { gather_rows[index] = row; });
}

/// Where gathered tokens come from, and what becomes of their sums.
__device__ inline void list_gathered(const RouteArgs& args, const PublishedIds& published,
                                     const JoinedTokens& tokens, const std::int32_t* gather_rows,
                                     std::int32_t num_gathered) {
  const LocalExperts local(args);
  const int num_tokens = tokens.first_token[args.num_ranks];
  for (int index = static_cast<int>(threadIdx.x); index < num_tokens; index += kJoinedThreads) {
    const std::int32_t row = gather_rows[index];
    const std::int32_t next = index + 1 < num_tokens ? gather_rows[index + 1] : num_gathered;
    if (row == next || row >= args.gather_rows) continue;
    const JoinedToken token(args, published, tokens, index);
    args.gather_source[row] = args.windows[token.rank].x + token.index * args.row_bytes;
    if (combines_per_rank(args)) {
      place_sum(args, tokens_of_rank(args, published, token.rank), local, token.index, row);
    }
  }
}

/// Every route of this rank's experts finds its row. `counts` [kJoinedWarps, L], gather_rows of
/// place_gathered(). By the whole block.
__device__ inline void place_joined(const RouteArgs& args, const PublishedIds& published,
                                    const JoinedTokens& tokens, const std::int32_t* gather_rows,
                                    std::uint16_t* counts) {
  const LocalExperts local(args);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  std::uint16_t* own_counts = counts + warp * local.count;
  const WarpPart part(tokens.first_token[args.num_ranks] * args.top_k, warp, kJoinedThreads);
  const auto expert_of = [&](int route) {
    const int index = route / args.top_k;
    return local.index(JoinedToken(args, published, tokens, index).ids[route - index * args.top_k]);
  };
  walk_warp_part(part, expert_of, own_counts, [](int, int, int) {});
  __syncthreads();
  sum_warp_counts(counts, kJoinedWarps, local.count, kJoinedThreads);
  __syncthreads();
  walk_warp_part(part, expert_of, own_counts, [&](int route, int expert, int before) {
    const int index = route / args.top_k;
    const int rank = tokens.rank_of(index);
    store_row(args, tokens_of_rank(args, published, rank),
              route - tokens.first_token[rank] * args.top_k, args.expert_begin[expert] + before,
              rank == args.rank ? -1 : gather_rows[index]);
  });
}

/// Clears what the passes count. By the whole block.
__device__ inline void clear_counts(const RouteArgs& args, std::uint16_t* counts) {
  for (int i = static_cast<int>(threadIdx.x); i < args.num_ranks * args.num_experts;
       i += kJoinedThreads) {
    args.chunk_counts[i] = 0;
  }
  const int num_counts = kJoinedWarps * LocalExperts(args).count;
  for (int i = static_cast<int>(threadIdx.x); i < num_counts; i += kJoinedThreads) counts[i] = 0;
}

/// All of the routing; `args` has frame and tables in shared memory, as `counts` and gather_rows
/// [tokens of all ranks]. By the whole block.
__device__ inline void route_joined(const RouteArgs& args, const PublishedIds& published,
                                    JoinedStorage& storage, std::uint16_t* counts,
                                    std::int32_t* gather_rows) {
  if (threadIdx.x == 0) storage.tokens.list(args, published);
  clear_counts(args, counts);
  __syncthreads();
  count_joined(args, published, storage.tokens);
  __syncthreads();
  if (!sum_rows(args, published)) return;
  const std::int32_t num_gathered = place_gathered(args, published, storage, gather_rows);
  list_groups(args, num_gathered, storage.scan);
  __syncthreads();
  list_gathered(args, published, storage.tokens, gather_rows, num_gathered);
  place_joined(args, published, storage.tokens, gather_rows, counts);
}

}  // namespace distmoe::cuda
