// SPDX-License-Identifier: Apache-2.0
//
// begin_call (one block): frame and header of a new call. Of a rank that has lost a peer the call
// fails here, before anything that peers read is written.
// publish: ids_window[t, k] = int32(ids[t, k]); -1 stays, an illegal id becomes -1 and the smallest
// such route is noted in the header; x_window[t] = x[t]; scores_window[t, k] = fp32(scores[t, k]).
#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/kernels/publish.hpp"
#include "backend/cuda/kernels/score.cuh"
#include "backend/cuda/ptx/grid_dependency.cuh"
#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {
namespace {

__device__ std::int64_t load_id(const PublishArgs& args, std::int64_t route) {
  const std::int64_t token = route / args.top_k;
  const std::int64_t k = route % args.top_k;
  const std::int64_t offset = token * args.id_token_stride + k * args.id_k_stride;
  return args.ids_are_64_bit ? static_cast<const std::int64_t*>(args.ids)[offset]
                             : static_cast<const std::int32_t*>(args.ids)[offset];
}

__global__ void begin_call(const __grid_constant__ PublishArgs args) {
  ptx::wait_for_earlier_kernels();
  CallState& state = *args.state;
  ++state.num_calls;
  // 0 means that nothing has arrived.
  state.gather_epoch = state.gather_epoch == UINT32_MAX ? 1 : state.gather_epoch + 1;
  CallFrame frame{};
  frame.gather_epoch = state.gather_epoch;
  const bool is_lost = state.lost.kind != FaultKind::kNone;
  if (is_lost) {
    frame.failed = 1;
    frame.fault = state.lost;
  } else if (args.is_refused != 0) {
    frame.failed = 1;
    frame.fault = {FaultKind::kRefusedByPeer, args.rank, 0, 0, 0};
  }
  *args.frame = frame;
  if (is_lost) return;
  *reinterpret_cast<PublishedHeader*>(args.ids_window) = {
      args.num_tokens, args.is_refused ? kRefusedCall : kNoBadRoute, 0};
}

__global__ void publish(const __grid_constant__ PublishArgs args) {
  ptx::wait_for_earlier_kernels();
  if (args.frame->failed != 0) return;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kPublishThreads + threadIdx.x;
  const std::int64_t num_threads = static_cast<std::int64_t>(gridDim.x) * kPublishThreads;
  auto* header = reinterpret_cast<PublishedHeader*>(args.ids_window);
  auto* ids = reinterpret_cast<std::int32_t*>(args.ids_window + sizeof(PublishedHeader));
  const std::int64_t num_routes = static_cast<std::int64_t>(args.num_tokens) * args.top_k;
  for (std::int64_t route = thread; route < num_routes; route += num_threads) {
    const std::int64_t id = load_id(args, route);
    const bool is_legal = id >= -1 && id < args.num_experts;
    ids[route] = is_legal ? static_cast<std::int32_t>(id) : -1;
    if (!is_legal) {
      atomicMin(reinterpret_cast<unsigned long long*>(&header->bad_route),
                static_cast<unsigned long long>(route));
    }
  }
  if (args.scores_window != 0) {
    auto* scores = reinterpret_cast<float*>(args.scores_window);
    for (std::int64_t route = thread; route < num_routes; route += num_threads) {
      scores[route] = load_score(args, route / args.top_k, route % args.top_k);
    }
  }
  if (args.x_window == 0) return;
  const std::int64_t vectors_per_row = args.row_bytes / 16;
  const std::int64_t num_vectors = args.num_tokens * vectors_per_row;
  for (std::int64_t i = thread; i < num_vectors; i += num_threads) {
    const std::int64_t token = i / vectors_per_row;
    const std::int64_t column = i % vectors_per_row;
    reinterpret_cast<uint4*>(args.x_window)[i] =
        reinterpret_cast<const uint4*>(args.x + token * args.x_stride_bytes)[column];
  }
}

/// The value of the first illegal id, once its place is known.
__global__ void note_bad_id(const __grid_constant__ PublishArgs args) {
  ptx::wait_for_earlier_kernels();
  if (args.frame->failed != 0) return;
  auto* header = reinterpret_cast<PublishedHeader*>(args.ids_window);
  if (header->bad_route != kNoBadRoute) header->bad_id = load_id(args, header->bad_route);
}

}  // namespace

cudaError_t prepare_publish() { return load_kernels(begin_call, publish, note_bad_id); }

cudaError_t launch_publish(const PublishArgs& args, int num_blocks, cudaStream_t stream) {
  if (const cudaError_t error = launch_early(begin_call, kSingleThreadLaunch, stream, args)) {
    return error;
  }
  if (args.num_tokens == 0) return cudaSuccess;
  if (const cudaError_t error = launch_early(publish, publish_launch(num_blocks), stream, args)) {
    return error;
  }
  return launch_early(note_bad_id, kSingleThreadLaunch, stream, args);
}

}  // namespace distmoe::cuda
