// SPDX-License-Identifier: Apache-2.0
//
// The three passes of routing.cuh: count and place with a block a chunk, scan with one block.
#include "backend/cuda/kernels/route.hpp"

#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/kernels/route_count.cuh"
#include "backend/cuda/kernels/route_place.cuh"
#include "backend/cuda/kernels/route_scan.cuh"
#include "backend/cuda/ptx/grid_dependency.cuh"

namespace distmoe::cuda {
namespace {

__global__ void count(const __grid_constant__ RouteArgs args) {
  extern __shared__ std::int32_t counts[];
  ptx::wait_for_earlier_kernels();
  if (args.frame->failed != 0) return;
  count_chunk(args, Chunk(args, PublishedIds(args), static_cast<int>(blockIdx.x)), counts);
}

__global__ void __launch_bounds__(kRouteScanThreads, 1)
    scan(const __grid_constant__ RouteArgs args) {
  __shared__ RouteScan<kRouteScanThreads> storage;
  ptx::wait_for_earlier_kernels();
  if (args.frame->failed != 0) return;
  scan_counts(args, PublishedIds(args), storage);
}

__global__ void place(const __grid_constant__ RouteArgs args) {
  extern __shared__ std::uint16_t counts_storage[];
  __shared__ PlaceStorage storage;
  ptx::wait_for_earlier_kernels();
  if (args.frame->failed != 0) return;
  const Chunk chunk(args, PublishedIds(args), static_cast<int>(blockIdx.x));
  place_chunk(args, chunk, storage, counts_storage);
}

}  // namespace

cudaError_t prepare_route() {
  if (const cudaError_t error = cudaFuncSetAttribute(
          count, cudaFuncAttributeMaxDynamicSharedMemorySize, route_count_bytes(kMaxExperts))) {
    return error;
  }
  if (const cudaError_t error = cudaFuncSetAttribute(
          place, cudaFuncAttributeMaxDynamicSharedMemorySize, route_place_bytes(kMaxExperts))) {
    return error;
  }
  return load_kernels(count, scan, place);
}

cudaError_t launch_route(const RouteArgs& args, cudaStream_t stream) {
  const int num_chunks = args.num_ranks * args.chunks_per_rank;
  if (const cudaError_t error =
          launch_early(count, route_count_launch(num_chunks, args.num_experts), stream, args)) {
    return error;
  }
  if (const cudaError_t error = launch_early(scan, kRouteScanLaunch, stream, args)) return error;
  return launch_early(place, route_place_launch(num_chunks, args.num_local_experts), stream, args);
}

}  // namespace distmoe::cuda
