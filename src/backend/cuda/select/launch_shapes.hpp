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
inline constexpr int kPeerBarrierThreads = 128;
inline constexpr int kRouteChunkThreads = 256;
inline constexpr int kRouteChunkWarps = kRouteChunkThreads / 32;
inline constexpr int kRouteScanThreads = 1024;
inline constexpr int kCombineThreads = 256;
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

constexpr std::int32_t route_count_bytes(std::int64_t num_experts) {
  return static_cast<std::int32_t>(num_experts * static_cast<int>(sizeof(std::int32_t)));
}

constexpr LaunchShape route_count_launch(std::int64_t num_chunks, std::int64_t num_experts) {
  return {num_chunks, kRouteChunkThreads, route_count_bytes(num_experts)};
}

constexpr std::int32_t route_place_bytes(std::int64_t num_local) {
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
};

/// A copy of the header and the ids that a rank published, at a multiple of the header's alignment.
DISTMOE_HOST_DEVICE constexpr std::int32_t published_copy_bytes(std::int64_t max_tokens,
                                                                std::int64_t top_k) {
  const std::int64_t ids = max_tokens * top_k * static_cast<std::int64_t>(sizeof(std::int32_t));
  const std::int64_t step = cuda_layout::kIdHeaderBytes;
  return static_cast<std::int32_t>(step + (ids + step - 1) / step * step);
}

/// The copies of all ranks, then what the passes count one after the other.
constexpr std::int64_t publish_route_shared(const PublishRouteSizes& sizes) {
  const std::int64_t counts = route_count_bytes(sizes.num_experts);
  const std::int64_t places = route_place_bytes(sizes.num_local_experts);
  return sizes.num_ranks * published_copy_bytes(sizes.max_tokens, sizes.top_k) +
         (counts > places ? counts : places);
}

/// 16-byte vectors of x that a thread copies where there are blocks enough.
inline constexpr std::int64_t kVectorsPerPublishThread = 4;

/// A block for the ids, the others for x.
constexpr LaunchShape publish_route_launch(const PublishRouteSizes& sizes, std::int64_t num_tokens,
                                           std::int64_t row_bytes, std::int64_t most_copy_blocks) {
  const std::int64_t per_block = 16 * kVectorsPerPublishThread * kPublishThreads;
  const std::int64_t copy_blocks = (num_tokens * row_bytes + per_block - 1) / per_block;
  return {1 + (copy_blocks < most_copy_blocks ? copy_blocks : most_copy_blocks), kPublishThreads,
          static_cast<std::int32_t>(publish_route_shared(sizes))};
}

/// `blocks` are persistent: all resident together, in clusters of kClusterBlocks.
constexpr LaunchShape grouped_gemm_launch(std::int64_t blocks) {
  return {blocks, kGemmThreads, static_cast<std::int32_t>(sizeof(GemmStorage))};
}

/// `blocks` are persistent, one an SM.
constexpr LaunchShape few_rows_launch(std::int64_t blocks) {
  return {blocks, kGemmThreads, static_cast<std::int32_t>(sizeof(FewRowsStorage))};
}

/// A block a token; score and id of each route in shared memory, and with a norm what its row is
/// multiplied by.
constexpr LaunchShape combine_launch(std::int64_t num_tokens, std::int64_t top_k,
                                     bool is_normed = false) {
  constexpr int kBytes = static_cast<int>(sizeof(float) + sizeof(std::int32_t));
  const int norm_bytes = is_normed ? static_cast<int>(sizeof(float)) : 0;
  return {num_tokens, kCombineThreads, static_cast<std::int32_t>(top_k * (kBytes + norm_bytes))};
}

/// A block a token; of each route score, row, owner and a place in the list of ranks, whose length
/// comes last.
constexpr LaunchShape combine_ranks_launch(std::int64_t num_tokens, std::int64_t top_k) {
  return {
      num_tokens, kCombineThreads,
      static_cast<std::int32_t>(top_k * static_cast<int>(sizeof(float) + 3 * sizeof(std::int32_t)) +
                                static_cast<int>(sizeof(std::int32_t)))};
}

/// `blocks` take sums in turn; score and row of each route in shared memory.
constexpr LaunchShape rank_sums_launch(std::int64_t blocks, std::int64_t top_k) {
  return {
      blocks, kRankSumThreads,
      static_cast<std::int32_t>(top_k * static_cast<int>(sizeof(float) + sizeof(std::int32_t)))};
}

/// `blocks` take pieces of rows in turn.
constexpr LaunchShape copy_rows_launch(std::int64_t blocks) {
  return {blocks, kCopyRowsThreads, 0};
}

}  // namespace distmoe::cuda
