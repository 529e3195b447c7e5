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
// after the other (publish_route.cu). Here is what they look at; each has a file: route_count.cuh,
// route_scan.cuh, route_place.cuh.
#pragma once

#include "backend/cuda/kernels/route.hpp"

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
      : index(chunk),
        source(chunk / args.chunks_per_rank),
        first_token(std::int64_t{chunk % args.chunks_per_rank} * kRouteChunkTokens) {
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

__device__ inline bool combines_per_rank(const RouteArgs& args) {
  return args.sums.row_of_route != nullptr;
}

}  // namespace distmoe::cuda
