// SPDX-License-Identifier: Apache-2.0
//
// What training does with rows around the products: which rows a token has here, what a saving
// forward keeps, and x of every row for the gradient of W13.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/call_frame.hpp"
#include "backend/cuda/published.hpp"
#include "backend/cuda/training_frame.hpp"
#include "layout/row_origin.hpp"

namespace distmoe::cuda {

/// Rows of this rank by token: of its own tokens [T, K], then of gathered ones [G, K]; -1: none.
struct TokenRows {
  std::int32_t* own = nullptr;
  std::int32_t* gathered = nullptr;
  std::int64_t bytes = 0;  ///< of both, which follow each other
};

/// What rows may stand for. NOTE: routing reads a peer's ids twice. Where the peer broke its word
/// in between, a row may be left that no route took, and holds what the memory held before.
struct RouteLimits {
  std::int64_t gather_rows = 0;  ///< that the plan gathers at most
  std::int32_t max_tokens = 0;
  std::int32_t num_ranks = 1;
  std::int32_t top_k = 0;
};

struct ListRowsArgs {
  CallFrame* frame = nullptr;
  const TrainingFrame* training = nullptr;
  TokenRows rows;
  const RowOrigin* row_origin = nullptr;       ///< [R]
  const std::int32_t* gather_index = nullptr;  ///< [R]
  /// A backward: where W13, run again, finds the row of x, in kept_x or in the gather buffer.
  std::uint64_t* token_row_address = nullptr;
  /// A single rank: where W2, or W13's DGRAD, stores the row: in the slot's h3 where a forward
  /// keeps it, else in `results`. A backward with combine per_rank: where W13's DGRAD stores it, in
  /// the combine window of the owner.
  std::uint64_t* result_row_address = nullptr;
  std::uint64_t results = 0;             ///< BF16 [T, K, D]
  const PeerWindows* windows = nullptr;  ///< [P], instead of `results`
  std::int64_t row_bytes = 0;            ///< 2 * D
  RouteLimits limits;
  std::int32_t is_backward = 0;
  std::int32_t rank = 0;
  std::int32_t top_k = 0;
};

struct SpreadXArgs {
  const CallFrame* frame = nullptr;
  const TrainingFrame* training = nullptr;
  TokenRows rows;
  std::uint64_t x = 0;  ///< own rows of a forward
  std::int64_t x_stride_bytes = 0;
  /// [G] rows in peers' windows, of a lean layer, whose gather buffer nothing has filled.
  const std::uint64_t* gather_source = nullptr;
  std::int64_t row_bytes = 0;
  std::int32_t is_backward = 0;  ///< takes own rows from kept_x, and nothing of a saved layer
  std::int32_t num_tokens = 0;
  std::int32_t top_k = 0;
};

struct KeepInputsArgs {
  const CallFrame* frame = nullptr;
  const std::int32_t* ids = nullptr;  ///< [T, K] published
  const void* scores = nullptr;       ///< [T, K]
  std::int64_t score_token_stride = 0;
  std::int64_t score_k_stride = 0;
  std::int32_t scores_are_bf16 = 0;
  std::int32_t* kept_ids = nullptr;
  float* kept_scores = nullptr;
  std::int32_t num_tokens = 0;
  std::int32_t top_k = 0;
};

struct KeepH3Args {
  const CallFrame* frame = nullptr;
  const TrainingFrame* training = nullptr;
  std::uint64_t results = 0;          ///< BF16 [T, K, D]
  const std::int32_t* ids = nullptr;  ///< [T, K]
  std::int64_t row_bytes = 0;
  std::int64_t num_routes = 0;
};

/// Loads the kernels on the current device; once, outside of captures, before any call.
cudaError_t prepare_training_rows();

/// Fills args.rows and, in a backward, counts the gathered rows. A row beyond the limits is not
/// listed.
cudaError_t launch_list_rows(const ListRowsArgs& args, int num_blocks, cudaStream_t stream);
/// x of every row, once the gather buffer is full; a forward that recomputes keeps its own rows.
cudaError_t launch_spread_x(const SpreadXArgs& args, int num_blocks, cudaStream_t stream);
/// Ids and, as FP32, scores.
cudaError_t launch_keep_inputs(const KeepInputsArgs& args, int num_blocks, cudaStream_t stream);
/// h3 of this rank's own routes, where the layer saves.
cudaError_t launch_keep_h3(const KeepH3Args& args, int num_blocks, cudaStream_t stream);

}  // namespace distmoe::cuda
