// SPDX-License-Identifier: Apache-2.0
//
// Grid, block and dynamic shared memory of every launch of a call: what the launchers in kernels/
// use and what `distmoe explain-kernels` prints. Without CUDA.
#pragma once

#include <cstdint>

#include "backend/cuda/tile/few_rows_storage.hpp"
#include "backend/cuda/tile/gemm_storage.hpp"
#include "formats/host_device.hpp"
#include "layout/cuda_layout.hpp"

namespace distmoe::cuda {

/// Experts at most: the per-warp counts of a block fit its shared memory.
inline constexpr int kMaxExperts = 8192;
/// Routes of a token at most: kRouteChunkTokens times as many rows count in 16 bits.
inline constexpr int kMaxTopK = 255;
inline constexpr int kRouteChunkTokens = static_cast<int>(cuda_layout::kRouteChunkTokens);
static_assert(kMaxTopK * kRouteChunkTokens <= 0xFFFF);

inline constexpr int kPublishThreads = 256;
/// Ranks whose tokens one block routes at most.
inline constexpr std::int64_t kMostJoinedRanks = 8;
inline constexpr int kPeerBarrierThreads = 128;
inline constexpr int kRouteChunkThreads = 256;
inline constexpr int kRouteChunkWarps = kRouteChunkThreads / 32;
inline constexpr int kRouteScanThreads = 1024;
inline constexpr int kCombineThreads = 256;
inline constexpr int kMostCombineThreads = 1024;
inline constexpr int kRankSumThreads = 256;
inline constexpr int kCopyRowsThreads = 1024;

struct LaunchShape {
  std::int64_t blocks;
  std::int32_t threads;       ///< of a block
  std::int32_t shared_bytes;  ///< of a block, dynamic
};

inline constexpr LaunchShape kSingleThreadLaunch = {1, 1, 0};
inline constexpr LaunchShape kPeerBarrierLaunch = {1, kPeerBarrierThreads, 0};
inline constexpr LaunchShape kRouteScanLaunch = {1, kRouteScanThreads, 0};

constexpr LaunchShape publish_launch(std::int64_t blocks) { return {blocks, kPublishThreads, 0}; }

/// Chunks of tokens that routing makes of every source rank.
constexpr std::int64_t route_chunks_per_rank(std::int64_t max_tokens) {
  return (max_tokens + kRouteChunkTokens - 1) / kRouteChunkTokens;
}

DISTMOE_HOST_DEVICE constexpr std::int32_t route_count_bytes(std::int64_t num_experts) {
  return static_cast<std::int32_t>(num_experts * static_cast<int>(sizeof(std::int32_t)));
}

constexpr LaunchShape route_count_launch(std::int64_t num_chunks, std::int64_t num_experts) {
  return {num_chunks, kRouteChunkThreads, route_count_bytes(num_experts)};
}

DISTMOE_HOST_DEVICE constexpr std::int32_t route_place_bytes(std::int64_t num_local) {
  return static_cast<std::int32_t>(kRouteChunkWarps * num_local *
                                   static_cast<int>(sizeof(std::uint16_t)));
}

constexpr LaunchShape route_place_launch(std::int64_t num_chunks, std::int64_t num_local) {
  return {num_chunks, kRouteChunkThreads, route_place_bytes(num_local)};
}

/// What the routing of the last block of publish_route looks at.
struct PublishRouteSizes {
  std::int64_t num_ranks = 1;
  std::int64_t max_tokens = 0;
  std::int64_t top_k = 0;
  std::int64_t num_experts = 0;
  std::int64_t num_local_experts = 0;
  bool has_scores = false;  ///< are published beside the ids
};

/// A copy of what a rank published: header, ids and scores as in its window, at a multiple of the
/// header's alignment.
DISTMOE_HOST_DEVICE constexpr std::int32_t published_copy_bytes(const PublishRouteSizes& sizes) {
  constexpr std::int64_t kStep = cuda_layout::kIdHeaderBytes;
  static_assert(sizeof(std::int32_t) == sizeof(float));
  const std::int64_t routes = sizes.max_tokens * sizes.top_k;
  const std::int64_t words = routes * static_cast<std::int64_t>(sizeof(std::int32_t));
  const std::int64_t padded = (words + kStep - 1) / kStep * kStep;
  return static_cast<std::int32_t>(kStep + padded + (sizes.has_scores ? padded : 0));
}

/// The dynamic shared memory of publish_route, as offsets in bytes: the copies of all ranks'
/// windows come first, then the tables of the routing, then what a pass counts.
struct PublishRouteLayout {
  std::int64_t groups = 0;           ///< TileGroup of both products
  std::int64_t rows_per_rank = 0;    ///< int64 [P]
  std::int64_t rows_per_expert = 0;  ///< int64 [E]
  std::int64_t chunk_counts = 0;     ///< int32 [P, E]
  std::int64_t chunk_tokens = 0;     ///< int32 [P]
  std::int64_t expert_begin = 0;     ///< int32 [L + 1]
  std::int64_t counts = 0;           ///< of the first pass, then of the third
  std::int64_t bytes = 0;
};

DISTMOE_HOST_DEVICE constexpr PublishRouteLayout publish_route_layout(
    const PublishRouteSizes& sizes) {
  constexpr std::int64_t kInt64 = sizeof(std::int64_t);
  constexpr std::int64_t kInt32 = sizeof(std::int32_t);
  const std::int64_t num_groups =
      sizes.num_local_experts * cuda_layout::tile_groups_per_expert(sizes.num_ranks);
  PublishRouteLayout layout;
  layout.groups = sizes.num_ranks * published_copy_bytes(sizes);
  layout.rows_per_rank = layout.groups + num_groups * cuda_layout::kTileGroupBytes;
  layout.rows_per_expert = layout.rows_per_rank + sizes.num_ranks * kInt64;
  layout.chunk_counts = layout.rows_per_expert + sizes.num_experts * kInt64;
  layout.chunk_tokens = layout.chunk_counts + sizes.num_ranks * sizes.num_experts * kInt32;
  layout.expert_begin = layout.chunk_tokens + sizes.num_ranks * kInt32;
  layout.counts = layout.expert_begin + (sizes.num_local_experts + 1) * kInt32;
  const std::int64_t counted = route_count_bytes(sizes.num_experts);
  const std::int64_t placed = route_place_bytes(sizes.num_local_experts);
  layout.bytes = layout.counts + (counted > placed ? counted : placed);
  return layout;
}

/// Of dynamic shared memory at most.
inline constexpr std::int64_t kMostPublishRouteBytes = 96 * 1024;

/// 16-byte vectors of x, and routes, that a thread publishes at once.
inline constexpr int kPublishedAtOnce = 4;

/// A block for the ids, the others for x.
constexpr LaunchShape publish_route_launch(const PublishRouteSizes& sizes, std::int64_t num_tokens,
                                           std::int64_t row_bytes, std::int64_t most_copy_blocks) {
  constexpr std::int64_t kBlockBytes = std::int64_t{16} * kPublishedAtOnce * kPublishThreads;
  const std::int64_t copy_blocks = (num_tokens * row_bytes + kBlockBytes - 1) / kBlockBytes;
  return {1 + (copy_blocks < most_copy_blocks ? copy_blocks : most_copy_blocks), kPublishThreads,
          static_cast<std::int32_t>(publish_route_layout(sizes).bytes)};
}

/// `blocks` are persistent: all resident together, in clusters of kClusterBlocks.
constexpr LaunchShape grouped_gemm_launch(std::int64_t blocks) {
  return {blocks, kGemmThreads, static_cast<std::int32_t>(sizeof(GemmStorage))};
}

/// `blocks` are persistent, one an SM.
constexpr LaunchShape few_rows_launch(std::int64_t blocks) {
  return {blocks, kGemmThreads, static_cast<std::int32_t>(sizeof(FewRowsStorage))};
}

/// Tokens whose blocks, one each, do not fill a GPU's SMs, so that the threads of a block must hide
/// the latency of memory.
inline constexpr std::int64_t kFewCombinedTokens = 128;

/// Of few tokens a thread takes one vector of 16 bytes of y, of many several.
constexpr std::int32_t combine_threads(std::int64_t num_tokens, std::int64_t hidden_dim) {
  if (num_tokens > kFewCombinedTokens) return kCombineThreads;
  const std::int64_t threads = (hidden_dim / 8 + 31) / 32 * 32;
  if (threads < kCombineThreads) return kCombineThreads;
  return threads < kMostCombineThreads ? static_cast<std::int32_t>(threads) : kMostCombineThreads;
}

/// A block a token; score and id of each route in shared memory, and with a norm what its row is
/// multiplied by.
constexpr LaunchShape combine_launch(std::int64_t num_tokens, std::int64_t top_k,
                                     std::int64_t hidden_dim, bool is_normed = false) {
  constexpr int kBytes = static_cast<int>(sizeof(float) + sizeof(std::int32_t));
  const int norm_bytes = is_normed ? static_cast<int>(sizeof(float)) : 0;
  return {num_tokens, combine_threads(num_tokens, hidden_dim),
          static_cast<std::int32_t>(top_k * (kBytes + norm_bytes))};
}

/// A block a token; of each route the row's address, score, owner and a place in the list of ranks,
/// whose length comes last.
constexpr LaunchShape combine_ranks_launch(std::int64_t num_tokens, std::int64_t top_k,
                                           std::int64_t hidden_dim) {
  constexpr int kBytes =
      static_cast<int>(sizeof(std::uint64_t) + sizeof(float) + 2 * sizeof(std::int32_t));
  return {num_tokens, combine_threads(num_tokens, hidden_dim),
          static_cast<std::int32_t>(top_k * kBytes + static_cast<int>(sizeof(std::int32_t)))};
}

/// `blocks` take sums, or parts of them, in turn; address and score of each route's row in shared
/// memory.
constexpr LaunchShape rank_sums_launch(std::int64_t blocks, std::int64_t top_k) {
  return {
      blocks, kRankSumThreads,
      static_cast<std::int32_t>(top_k * static_cast<int>(sizeof(std::uint64_t) + sizeof(float)))};
}

/// `blocks` take pieces of rows in turn.
constexpr LaunchShape copy_rows_launch(std::int64_t blocks) {
  return {blocks, kCopyRowsThreads, 0};
}

}  // namespace distmoe::cuda
