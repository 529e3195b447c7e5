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
#include "backend/cuda/kernels/route_count.cuh"
#include "backend/cuda/kernels/route_place.cuh"
#include "backend/cuda/kernels/route_scan.cuh"
#include "backend/cuda/ptx/flag.cuh"
#include "backend/cuda/ptx/grid_dependency.cuh"
#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {
namespace {

static_assert(kRouteChunkThreads == kPublishThreads);

/// Whether this rank has lost a peer. NOTE: read by one thread, since a host that leaves may change
/// it meanwhile. By the whole block.
__device__ bool has_lost_a_peer(const CallState& state) {
  __shared__ bool has_lost;
  if (threadIdx.x == 0) has_lost = state.lost.kind != FaultKind::kNone;
  __syncthreads();
  return has_lost;
}

/// What a thread publishes first, on its way while its block asks whether it may.
template <typename Value>
struct EarlyLoads {
  std::int64_t first;
  std::int64_t step;
  std::int64_t count;  ///< of all threads
  Value values[kPublishedAtOnce];

  template <typename Load>
  __device__ EarlyLoads(PublishingThreads threads, std::int64_t count, const Load& load)
      : first(threads.first), step(threads.count), count(count) {
#pragma unroll
    for (int i = 0; i < kPublishedAtOnce; ++i) {
      if (first + i * step < count) values[i] = load(first + i * step);
    }
  }
  template <typename Store>
  __device__ void store(const Store& store) const {
#pragma unroll
    for (int i = 0; i < kPublishedAtOnce; ++i) {
      if (first + i * step < count) store(first + i * step, values[i]);
    }
  }
  /// Those that come after.
  __device__ PublishingThreads others() const { return {first + kPublishedAtOnce * step, step}; }
};

/// Block 0's part. All of its threads return when the ids are published. The header comes last, so
/// that nothing waits for a load of what was stored.
__device__ void begin_and_publish_ids(const PublishArgs& args) {
  __shared__ std::int64_t bad_route;
  const PublishingThreads threads = {threadIdx.x, kPublishThreads};
  const EarlyLoads<std::int64_t> ids(threads, num_routes(args),
                                     [&](std::int64_t route) { return load_id(args, route); });
  const EarlyLoads<float> scores(threads, args.scores_window != 0 ? num_routes(args) : 0,
                                 [&](std::int64_t route) { return load_score(args, route); });
  if (threadIdx.x == 0) bad_route = kNoBadRoute;
  const bool is_silent = has_lost_a_peer(*args.state);
  if (threadIdx.x == 0) *args.frame = next_frame(*args.state, args.head);
  if (is_silent) return;
  ids.store([&](std::int64_t route, std::int64_t id) { publish_id(args, route, id, &bad_route); });
  scores.store([&](std::int64_t route, float score) {
    reinterpret_cast<float*>(args.scores_window)[route] = score;
  });
  publish_ids(args, ids.others(), &bad_route);
  publish_scores(args, ids.others());
  __syncthreads();
  if (threadIdx.x != 0) return;
  const std::int64_t bad_id = bad_route == kNoBadRoute ? 0 : load_id(args, bad_route);
  *header_of(args) = {args.num_tokens, bad_route, bad_id};
}

/// The other blocks' part.
__device__ void publish_x_early(const PublishArgs& args) {
  const EarlyLoads<uint4> vectors(
      {(static_cast<std::int64_t>(blockIdx.x) - 1) * kPublishThreads + threadIdx.x,
       (static_cast<std::int64_t>(gridDim.x) - 1) * kPublishThreads},
      num_vectors(args), [&](std::int64_t vector) { return load_vector(args, vector); });
  if (has_lost_a_peer(*args.state)) return;
  vectors.store([&](std::int64_t vector, const uint4& value) {
    reinterpret_cast<uint4*>(args.x_window)[vector] = value;
  });
  publish_x(args, vectors.others());
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

/// Sizes of the routing as the launch knows them.
__device__ PublishRouteSizes sizes_of(const PublishRouteArgs& args) {
  return {.num_ranks = args.route.num_ranks,
          .max_tokens = args.max_tokens,
          .top_k = args.route.top_k,
          .num_experts = args.route.num_experts,
          .num_local_experts = LocalExperts(args.route).count,
          .has_scores = combines_per_rank(args.route)};
}

/// Copies what every rank published to `copies`, shared memory. By the whole block.
__device__ PublishedIds copy_published(const PublishRouteArgs& args, unsigned char* copies) {
  const int copy_bytes = published_copy_bytes(sizes_of(args));
  const int num_vectors = copy_bytes / static_cast<int>(sizeof(uint4));
  const int all_vectors = args.route.num_ranks * num_vectors;
  // NOTE: loads of a thread are in flight together, so that all take one round trip of the link.
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < all_vectors; i += kPublishThreads) {
    const int rank = i / num_vectors;
    const int vector = i - rank * num_vectors;
    reinterpret_cast<uint4*>(copies)[i] =
        __ldcg(reinterpret_cast<const uint4*>(args.route.windows[rank].ids) + vector);
  }
  __syncthreads();
  return {copies, copy_bytes};
}

/// What the last block keeps in shared memory; passes follow each other.
union RoutingStorage {
  RouteScan<kPublishThreads> scan;
  PlaceStorage place;
};

/// The arguments of the passes with frame and tables in shared memory, where the passes look at
/// them many times, each time in a few cycles instead of a round trip to L2.
__device__ RouteArgs in_shared_memory(const RouteArgs& args, unsigned char* shared,
                                      const PublishRouteLayout& layout, CallFrame& frame) {
  RouteArgs moved = args;
  moved.frame = &frame;
  moved.groups = reinterpret_cast<TileGroup*>(shared + layout.groups);
  moved.rows_per_rank = reinterpret_cast<std::int64_t*>(shared + layout.rows_per_rank);
  moved.rows_per_expert = reinterpret_cast<std::int64_t*>(shared + layout.rows_per_expert);
  moved.chunk_counts = reinterpret_cast<std::int32_t*>(shared + layout.chunk_counts);
  moved.chunk_tokens = reinterpret_cast<std::int32_t*>(shared + layout.chunk_tokens);
  moved.expert_begin = reinterpret_cast<std::int32_t*>(shared + layout.expert_begin);
  return moved;
}

/// The three passes; a chunk holds all tokens of a rank. By the whole block.
__device__ void route(const RouteArgs& args, const PublishedIds& published, RoutingStorage& storage,
                      unsigned char* counts) {
  for (int rank = 0; rank < args.num_ranks; ++rank) {
    count_chunk(args, Chunk(args, published, rank), reinterpret_cast<std::int32_t*>(counts));
    __syncthreads();
  }
  scan_counts(args, published, storage.scan);
  __syncthreads();
  if (args.frame->failed != 0) return;
  for (int rank = 0; rank < args.num_ranks; ++rank) {
    place_chunk(args, Chunk(args, published, rank), storage.place,
                reinterpret_cast<std::uint16_t*>(counts));
    __syncthreads();
  }
}

/// By the whole block.
template <typename Element>
__device__ void copy_table(Element* to, const Element* from, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kPublishThreads) to[i] = from[i];
}

__device__ void copy_frame(CallFrame& to, const CallFrame& from) {
  static_assert(sizeof(CallFrame) % sizeof(std::uint32_t) == 0);
  copy_table(reinterpret_cast<std::uint32_t*>(&to), reinterpret_cast<const std::uint32_t*>(&from),
             static_cast<int>(sizeof(CallFrame) / sizeof(std::uint32_t)));
}

/// Shows later kernels and the host what was routed.
__device__ void copy_out(const RouteArgs& from, const RouteArgs& to) {
  copy_frame(*to.frame, *from.frame);
  copy_table(to.rows_per_rank, from.rows_per_rank, to.num_ranks);
  copy_table(to.rows_per_expert, from.rows_per_expert, to.num_experts);
  if (from.frame->failed != 0) return;
  const LocalExperts local(to);
  copy_table(to.expert_begin, from.expert_begin, local.count + 1);
  for (const Product product : {Product::kW13, Product::kW2}) {
    copy_table(groups_of(to.groups, product, local.count, to.num_ranks),
               groups_of(from.groups, product, local.count, to.num_ranks),
               from.frame->counts[static_cast<int>(product)].num_groups);
  }
}

__global__ void __launch_bounds__(kPublishThreads, 1)
    publish_route(const __grid_constant__ PublishRouteArgs args) {
  extern __shared__ __align__(128) unsigned char shared[];  // of a PublishRouteLayout
  __shared__ RoutingStorage storage;
  __shared__ CallFrame frame;
  ptx::wait_for_earlier_kernels();
  prefetch_windows(args.meeting);
  if (blockIdx.x == 0) {
    begin_and_publish_ids(args.publish);
  } else {
    publish_x_early(args.publish);
  }
  if (!is_last_block(*args.publish.state)) return;
  meet_peers(args.meeting);
  // No sooner: its blocks fill SMs, and a peer that shares them may have to come here first.
  ptx::let_next_kernel_start();
  __syncthreads();
  if (args.route.frame->failed != 0) return;
  copy_frame(frame, *args.route.frame);
  const PublishedIds published = copy_published(args, shared);
  const PublishRouteLayout layout = publish_route_layout(sizes_of(args));
  const RouteArgs moved = in_shared_memory(args.route, shared, layout, frame);
  route(moved, published, storage, shared + layout.counts);
  __syncthreads();
  copy_out(moved, args.route);
}

}  // namespace

cudaError_t prepare_publish_route() {
  if (const cudaError_t error =
          cudaFuncSetAttribute(publish_route, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(kMostPublishRouteBytes))) {
    return error;
  }
  return load_kernels(publish_route);
}

cudaError_t launch_publish_route(const PublishRouteArgs& args, std::int64_t most_copy_blocks,
                                 cudaStream_t stream) {
  const RouteArgs& route = args.route;
  return launch_early(
      publish_route,
      publish_route_launch({.num_ranks = route.num_ranks,
                            .max_tokens = args.max_tokens,
                            .top_k = route.top_k,
                            .num_experts = route.num_experts,
                            .num_local_experts = route.num_local_experts,
                            .has_scores = args.publish.scores_window != 0},
                           args.publish.num_tokens, args.publish.row_bytes, most_copy_blocks),
      stream, args);
}

}  // namespace distmoe::cuda
