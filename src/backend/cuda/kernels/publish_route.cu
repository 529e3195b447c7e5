// SPDX-License-Identifier: Apache-2.0
//
// The head of a call of few tokens with peers, from its beginning to its routing, in one launch.
//
//   block 0       begins the call, publishes ids and scores
//   other blocks  copy x into the dispatch window
//   the block that ends last: tells the peers, waits for them, copies what all ranks published into
//     shared memory, one round trip of the link, and makes the three passes of routing there
//
// No block waits for another one of its grid, and one alone waits for peers, so that ranks may
// share a device.
#include "backend/cuda/kernels/publish_route.hpp"

#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/kernels/peer_meeting.cuh"
#include "backend/cuda/kernels/publishing.cuh"
#include "backend/cuda/kernels/routing.cuh"
#include "backend/cuda/ptx/flag.cuh"
#include "backend/cuda/ptx/grid_dependency.cuh"
#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {
namespace {

static_assert(kRouteChunkThreads == kPublishThreads);

/// Block 0's part. All of its threads return when the ids are published.
__device__ void begin_and_publish_ids(const PublishArgs& args, bool is_lost) {
  const PublishingThreads threads = {threadIdx.x, kPublishThreads};
  if (threadIdx.x == 0) begin_call(args);
  if (is_lost) return;
  publish_scores(args, threads);
  __syncthreads();
  publish_ids(args, threads);
  __syncthreads();
  if (threadIdx.x == 0) note_bad_id(args);
}

/// Whether all other blocks have done their parts, whose writes are then visible to this one. By
/// the whole block; true in one block of the grid.
__device__ bool is_last_block(CallState& state) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = ptx::add_acquire_release_gpu(&state.published_blocks, 1) == gridDim.x - 1;
    if (is_last) state.published_blocks = 0;
  }
  __syncthreads();
  return is_last;
}

/// Copies every rank's header and ids to `copies`, shared memory. By the whole block.
__device__ PublishedIds copy_published(const PublishRouteArgs& args, std::uint32_t* copies) {
  const int num_words =
      (args.max_tokens * args.route.top_k) + static_cast<int>(sizeof(PublishedHeader) / 4);
  const int copy_bytes = published_copy_bytes(args.max_tokens, args.route.top_k);
  const int stride = copy_bytes / 4;
  const int all_words = args.route.num_ranks * num_words;
  // NOTE: loads of a thread are in flight together, so that all take one round trip of the link.
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x); i < all_words; i += kPublishThreads) {
    const int rank = i / num_words;
    const int word = i % num_words;
    copies[rank * stride + word] =
        __ldcg(reinterpret_cast<const std::uint32_t*>(args.route.windows[rank].ids) + word);
  }
  __syncthreads();
  return {reinterpret_cast<const unsigned char*>(copies), copy_bytes};
}

/// What the last block keeps in shared memory; passes follow each other.
union RoutingStorage {
  RouteScan<kPublishThreads> scan;
  PlaceStorage place;
};

/// The three passes. By the whole block.
__device__ void route(const RouteArgs& args, const PublishedIds& published, RoutingStorage& shared,
                      unsigned char* counts) {
  for (int chunk = 0; chunk < args.num_ranks; ++chunk) {
    count_chunk(args, Chunk(args, published, chunk), reinterpret_cast<std::int32_t*>(counts));
    __syncthreads();
  }
  scan_counts(args, published, shared.scan);
  __syncthreads();
  if (args.frame->failed != 0) return;
  for (int chunk = 0; chunk < args.num_ranks; ++chunk) {
    place_chunk(args, Chunk(args, published, chunk), shared.place,
                reinterpret_cast<std::uint16_t*>(counts));
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kPublishThreads, 1)
    publish_route(const __grid_constant__ PublishRouteArgs args) {
  // As publish_route_shared() says: the copies, then the counts.
  extern __shared__ __align__(128) std::uint32_t copies[];
  __shared__ RoutingStorage storage;
  ptx::wait_for_earlier_kernels();
  // NOTE: read by one thread, since a host that leaves may change it meanwhile.
  __shared__ bool is_lost;
  if (threadIdx.x == 0) is_lost = args.publish.state->lost.kind != FaultKind::kNone;
  __syncthreads();
  if (blockIdx.x == 0) {
    begin_and_publish_ids(args.publish, is_lost);
  } else if (!is_lost) {
    publish_x(args.publish, {(static_cast<std::int64_t>(blockIdx.x) - 1) * kPublishThreads +
                                 static_cast<std::int64_t>(threadIdx.x),
                             (static_cast<std::int64_t>(gridDim.x) - 1) * kPublishThreads});
  }
  if (!is_last_block(*args.publish.state)) return;
  meet_peers(args.meeting);
  // No sooner: its blocks fill SMs, and a peer that shares them may have to come here first.
  ptx::let_next_kernel_start();
  __syncthreads();
  if (args.route.frame->failed != 0) return;
  const PublishedIds published = copy_published(args, copies);
  auto* counts = reinterpret_cast<unsigned char*>(copies) +
                 args.route.num_ranks * published_copy_bytes(args.max_tokens, args.route.top_k);
  route(args.route, published, storage, counts);
}

}  // namespace

cudaError_t prepare_publish_route() { return load_kernels(publish_route); }

cudaError_t launch_publish_route(const PublishRouteArgs& args, std::int64_t most_copy_blocks,
                                 cudaStream_t stream) {
  const RouteArgs& route = args.route;
  const auto local = num_local_experts(route.num_experts, route.num_ranks, route.rank);
  return launch_early(
      publish_route,
      publish_route_launch({.num_ranks = route.num_ranks,
                            .max_tokens = args.max_tokens,
                            .top_k = route.top_k,
                            .num_experts = route.num_experts,
                            .num_local_experts = local},
                           args.publish.num_tokens, args.publish.row_bytes, most_copy_blocks),
      stream, args);
}

}  // namespace distmoe::cuda
