// SPDX-License-Identifier: Apache-2.0
//
// One block a sum at a time; a thread owns 4 columns at a time, so that a warp stores 512
// neighbouring bytes into the peer's window.
#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/kernels/rank_sums.hpp"
#include "backend/cuda/kernels/weighted_row.cuh"
#include "backend/cuda/ptx/grid_dependency.cuh"
#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {
namespace {

constexpr int kColumns = 4;

__global__ void rank_sums(const __grid_constant__ RankSumArgs args) {
  extern __shared__ float scores[];  // [K], then the rows [K]
  auto* rows = reinterpret_cast<std::int32_t*>(scores + args.top_k);
  ptx::wait_for_earlier_kernels();
  if (args.frame->failed != 0) return;
  const int num_sums = args.frame->num_gather_rows;
  const int num_vectors = args.hidden_dim / kColumns;
  const auto* h3 = reinterpret_cast<const uint2*>(args.h3);
  for (int sum = static_cast<int>(blockIdx.x); sum < num_sums; sum += static_cast<int>(gridDim.x)) {
    __syncthreads();  // the sum before is read
    for (int k = static_cast<int>(threadIdx.x); k < args.top_k; k += kRankSumThreads) {
      const std::int64_t at = std::int64_t{sum} * args.top_k + k;
      rows[k] = args.rows[at];
      scores[k] = args.scores[at];
    }
    __syncthreads();
    auto* out = reinterpret_cast<float4*>(args.address[sum]);
    for (int vector = static_cast<int>(threadIdx.x); vector < num_vectors;
         vector += kRankSumThreads) {
      float sums[kColumns] = {};
#pragma unroll 4
      for (int k = 0; k < args.top_k; ++k) {
        if (rows[k] < 0) continue;
        add_scaled(unpack(__ldcs(&h3[std::int64_t{rows[k]} * num_vectors + vector])), scores[k],
                   sums);
      }
      out[vector] = {sums[0], sums[1], sums[2], sums[3]};
    }
  }
}

}  // namespace

cudaError_t prepare_rank_sums() { return load_kernels(rank_sums); }

cudaError_t launch_rank_sums(const RankSumArgs& args, int num_blocks, cudaStream_t stream) {
  return launch_early(rank_sums, rank_sums_launch(num_blocks, args.top_k), stream, args);
}

}  // namespace distmoe::cuda
