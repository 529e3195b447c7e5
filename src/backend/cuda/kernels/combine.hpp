// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/kernels/call_state.hpp"
#include "backend/cuda/kernels/norm_args.hpp"
#include "backend/cuda/kernels/peer_barrier.hpp"
#include "backend/cuda/row_table.hpp"

namespace distmoe::cuda {

struct CombineArgs {
  CallState* state = nullptr;
  CallFrame* frame = nullptr;
  std::uint64_t results = 0;  ///< BF16 [T, K, D]; per_rank: FP32 [T, sums, D]
  /// Where the results of a saving call of a single rank are instead, unless 0 is there.
  const std::uint64_t* results_at = nullptr;
  const std::int32_t* ids = nullptr;    ///< [T, K], published
  const void* scores = nullptr;         ///< [T, K]
  std::int64_t score_token_stride = 0;  ///< in elements
  std::int64_t score_k_stride = 0;
  std::int32_t scores_are_bf16 = 0;
  std::int32_t num_tokens = 0;
  std::int32_t top_k = 0;
  std::int32_t hidden_dim = 0;  ///< a multiple of 8
  std::uint64_t y = 0;          ///< BF16 [T, D]
  std::int64_t y_stride_bytes = 0;
  NormArgs norm{};  ///< of combine per_route
  // Combine per_rank.
  const std::int32_t* row_of_route = nullptr;  ///< [T, K] of this rank's experts; null: per_route
  RowTable h3{};                               ///< BF16 [R, D], this rank's rows
  std::int32_t sums_per_token = 0;             ///< room in `results`
  std::int32_t num_experts = 0;
  std::int32_t num_ranks = 1;
  std::int32_t rank = 0;
  /// Of PeerBarrier::kResultsStored, where the launch meets the peers itself.
  PeerBarrierArgs meeting{};
  std::int32_t meets_peers = 0;
};

/// Loads the kernels on the current device; once, outside of captures, before any call.
cudaError_t prepare_combine();

/// y[t] = bf16(sum_k fp32(results[t, k]) * score[t, k]), k in order, routes with id -1 left out;
/// with a norm every row is multiplied by its rstd, and by its gain first where there is a gamma.
/// Per rank: y[t] = bf16(sum over ranks, ascending, of the rank's sum), where the sums of peers lie
/// in `results` in the same order and this rank's own is made here of its rows. Of a failed call y
/// becomes NaN, and its fault the state's first one where none is kept yet.
/// With meets_peers all blocks must fit the device together, with whatever a peer on it still runs.
cudaError_t launch_combine(const CombineArgs& args, cudaStream_t stream);

}  // namespace distmoe::cuda
