// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/call_frame.hpp"
#include "backend/cuda/row_table.hpp"

namespace distmoe::cuda {

struct RankSumArgs {
  const CallFrame* frame = nullptr;
  RowTable h3{};                           ///< BF16 [R, D], this rank's rows
  const std::uint64_t* address = nullptr;  ///< [gather rows] FP32 row in the owner's window
  const std::int32_t* rows = nullptr;      ///< [gather rows, K] -1: not of this rank
  const float* scores = nullptr;           ///< [gather rows, K]
  std::int32_t top_k = 0;
  std::int32_t hidden_dim = 0;  ///< a multiple of 8
};

/// Loads the kernel on the current device; once, outside of captures, before any call.
cudaError_t prepare_rank_sums();

/// Combine per_rank: of every token of a peer that has routes here, one FP32 row
/// sum_k fp32(h3[row of k]) * score[k], k in order, into the combine window of its owner.
cudaError_t launch_rank_sums(const RankSumArgs& args, int num_blocks, cudaStream_t stream);

}  // namespace distmoe::cuda
