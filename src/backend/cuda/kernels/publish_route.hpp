// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/kernels/peer_barrier.hpp"
#include "backend/cuda/kernels/publish.hpp"
#include "backend/cuda/kernels/route.hpp"

namespace distmoe::cuda {

struct PublishRouteArgs {
  PublishArgs publish;
  PeerBarrierArgs meeting;  ///< the whole of PeerBarrier::kPublished
  RouteArgs route;          ///< a chunk a rank: max_tokens <= kRouteChunkTokens
  std::int32_t max_tokens = 0;
};

/// Loads the kernel on the current device; once, outside of captures, before any call.
cudaError_t prepare_publish_route();

/// launch_publish(), launch_peer_barrier() and launch_route() in one launch of
/// publish_route_launch(), for the calls that joins_publish_and_route() names; the same bits.
cudaError_t launch_publish_route(const PublishRouteArgs& args, std::int64_t most_copy_blocks,
                                 cudaStream_t stream);

}  // namespace distmoe::cuda
