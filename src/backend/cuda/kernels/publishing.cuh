// SPDX-License-Identifier: Apache-2.0
//
// What begins a call and shows peers what they need of it: steps that kernels of their own make
// (publish.cu), or the blocks of one (publish_route.cu).
//
//   begin_call      frame and header of a new call. Of a rank that has lost a peer the call fails
//                   here, and no step writes anything that peers read
//   publish_ids     ids_window[t, k] = int32(ids[t, k]); -1 stays, an illegal id becomes -1 and the
//                   smallest such route is noted
//   publish_x       x_window[t] = x[t]
//   publish_scores  scores_window[t, k] = fp32(scores[t, k])
//   note_bad_id     the value of the first illegal id, once its place is known
#pragma once

#include "backend/cuda/kernels/begin_call.cuh"
#include "backend/cuda/kernels/expert_id.cuh"
#include "backend/cuda/kernels/publish.hpp"
#include "backend/cuda/kernels/score.cuh"

namespace distmoe::cuda {

/// The threads that share a step.
struct PublishingThreads {
  std::int64_t first;
  std::int64_t count;
};

__device__ inline PublishedHeader* header_of(const PublishArgs& args) {
  return reinterpret_cast<PublishedHeader*>(args.ids_window);
}

/// By one thread.
__device__ inline void begin_call(const PublishArgs& args) {
  const CallFrame frame = next_frame(*args.state, args.head);
  *args.frame = frame;
  publish_header(frame, args.ids_window, args.num_tokens);
}

__device__ inline std::int64_t num_routes(const PublishArgs& args) {
  return static_cast<std::int64_t>(args.num_tokens) * args.top_k;
}

/// `first_bad_route`, kNoBadRoute at first, is of all threads that share the step.
__device__ inline void publish_id(const PublishArgs& args, std::int64_t route, std::int64_t id,
                                  std::int64_t* first_bad_route) {
  auto* ids = reinterpret_cast<std::int32_t*>(args.ids_window + sizeof(PublishedHeader));
  const bool is_legal = id >= -1 && id < args.num_experts;
  ids[route] = is_legal ? static_cast<std::int32_t>(id) : -1;
  if (!is_legal) {
    atomicMin(reinterpret_cast<unsigned long long*>(first_bad_route),
              static_cast<unsigned long long>(route));
  }
}

__device__ inline void publish_ids(const PublishArgs& args, const PublishingThreads& threads,
                                   std::int64_t* first_bad_route) {
  for (std::int64_t route = threads.first; route < num_routes(args); route += threads.count) {
    publish_id(args, route, load_id(args, route), first_bad_route);
  }
}

__device__ inline float load_score(const PublishArgs& args, std::int64_t route) {
  return load_score(args, route / args.top_k, route % args.top_k);
}

__device__ inline void publish_scores(const PublishArgs& args, const PublishingThreads& threads) {
  if (args.scores_window == 0) return;
  auto* scores = reinterpret_cast<float*>(args.scores_window);
  for (std::int64_t route = threads.first; route < num_routes(args); route += threads.count) {
    scores[route] = load_score(args, route);
  }
}

/// 16 bytes of x; the dispatch window has them one after the other.
__device__ inline std::int64_t num_vectors(const PublishArgs& args) {
  return static_cast<std::int64_t>(args.num_tokens) * (args.row_bytes / 16);
}
__device__ inline uint4 load_vector(const PublishArgs& args, std::int64_t vector) {
  const std::int64_t vectors_per_row = args.row_bytes / 16;
  const std::int64_t token = vector / vectors_per_row;
  const auto* row = reinterpret_cast<const uint4*>(args.x + token * args.x_stride_bytes);
  return row[vector - token * vectors_per_row];
}

__device__ inline void publish_x(const PublishArgs& args, const PublishingThreads& threads) {
  if (args.x_window == 0) return;
  for (std::int64_t i = threads.first; i < num_vectors(args); i += threads.count) {
    reinterpret_cast<uint4*>(args.x_window)[i] = load_vector(args, i);
  }
}

/// By one thread, when all ids are published. Past L1, which the minimum was not made in.
__device__ inline void note_bad_id(const PublishArgs& args) {
  PublishedHeader* header = header_of(args);
  const std::int64_t bad_route = __ldcg(&header->bad_route);
  if (bad_route != kNoBadRoute) header->bad_id = load_id(args, bad_route);
}

}  // namespace distmoe::cuda
