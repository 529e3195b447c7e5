// SPDX-License-Identifier: Apache-2.0
//
// The steps of publishing.cuh, with a kernel for all that must come before the next.
#include "backend/cuda/kernels/publish.hpp"

#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/kernels/publishing.cuh"
#include "backend/cuda/ptx/grid_dependency.cuh"
#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {
namespace {

__global__ void begin(const __grid_constant__ PublishArgs args) {
  ptx::wait_for_earlier_kernels();
  begin_call(args);
}

__global__ void publish(const __grid_constant__ PublishArgs args) {
  ptx::wait_for_earlier_kernels();
  if (args.frame->failed != 0) return;
  const PublishingThreads threads = {
      static_cast<std::int64_t>(blockIdx.x) * kPublishThreads + threadIdx.x,
      static_cast<std::int64_t>(gridDim.x) * kPublishThreads};
  publish_ids(args, threads, &header_of(args)->bad_route);
  publish_scores(args, threads);
  publish_x(args, threads);
}

__global__ void note(const __grid_constant__ PublishArgs args) {
  ptx::wait_for_earlier_kernels();
  if (args.frame->failed != 0) return;
  note_bad_id(args);
}

}  // namespace

cudaError_t prepare_publish() { return load_kernels(begin, publish, note); }

cudaError_t launch_publish(const PublishArgs& args, int num_blocks, cudaStream_t stream) {
  if (const cudaError_t error = launch_early(begin, kSingleThreadLaunch, stream, args)) {
    return error;
  }
  if (args.num_tokens == 0) return cudaSuccess;
  if (const cudaError_t error = launch_early(publish, publish_launch(num_blocks), stream, args)) {
    return error;
  }
  return launch_early(note, kSingleThreadLaunch, stream, args);
}

}  // namespace distmoe::cuda
