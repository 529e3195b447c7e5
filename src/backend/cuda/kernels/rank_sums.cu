// SPDX-License-Identifier: Apache-2.0
//
// One block a sum at a time, or a part of its columns where the sums are too few for all blocks; a
// thread owns 4 columns at a time, so that a warp stores 512 neighbouring bytes into the peer's
// window.
#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/kernels/rank_sums.hpp"
#include "backend/cuda/kernels/weighted_row.cuh"
#include "backend/cuda/ptx/grid_dependency.cuh"
#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {
namespace {

constexpr int kColumns = 4;

/// Parts of a sum that blocks take, each a whole number of a block's vectors.
__device__ int num_parts(int num_sums, int num_vectors) {
  const int most = (num_vectors + kRankSumThreads - 1) / kRankSumThreads;
  return max(1, min(most, static_cast<int>(gridDim.x) / max(num_sums, 1)));
}

__global__ void rank_sums(const __grid_constant__ RankSumArgs args) {
  extern __shared__ std::uint64_t h3[];  // [K] addresses, 0: not of this rank; then the scores [K]
  auto* scores = reinterpret_cast<float*>(h3 + args.top_k);
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  if (args.frame->failed != 0) return;
  const int num_sums = args.frame->num_gather_rows;
  const int num_vectors = args.hidden_dim / kColumns;
  const int parts = num_parts(num_sums, num_vectors);
  for (int i = static_cast<int>(blockIdx.x); i < num_sums * parts;
       i += static_cast<int>(gridDim.x)) {
    const int sum = i / parts;
    __syncthreads();  // the sum before is read
    for (int k = static_cast<int>(threadIdx.x); k < args.top_k; k += kRankSumThreads) {
      const std::int64_t at = std::int64_t{sum} * args.top_k + k;
      const std::int32_t row = args.rows[at];
      h3[k] = row < 0 ? 0 : row_address(args.h3, row);
      scores[k] = args.scores[at];
    }
    __syncthreads();
    auto* out = reinterpret_cast<float4*>(args.address[sum]);
    for (int vector = (i - sum * parts) * kRankSumThreads + static_cast<int>(threadIdx.x);
         vector < num_vectors; vector += parts * kRankSumThreads) {
      float sums[kColumns] = {};
#pragma unroll 4
      for (int k = 0; k < args.top_k; ++k) {
        if (h3[k] == 0) continue;
        add_scaled(unpack(__ldcs(reinterpret_cast<const uint2*>(h3[k]) + vector)), scores[k], sums);
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
