// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "backend/cuda/kernels/call_state.hpp"
#include "backend/cuda/select/launch_shapes.hpp"
#include "layout/row_origin.hpp"

namespace distmoe::cuda {

/// What combine per_rank needs of the routing: which rows this rank sums for which token, and where
/// the sum goes. A sum belongs to a gathered token (gather row g), so that sums are those rows.
struct SumTables {
  std::int32_t* row_of_route = nullptr;  ///< [T, K] own tokens; written where the row is here
  std::uint64_t* address = nullptr;      ///< [gather rows] FP32 row in the owner's combine window
  std::int32_t* rows = nullptr;          ///< [gather rows, K] -1: not of this rank
  float* scores = nullptr;               ///< [gather rows, K] written where there is a row
  std::int64_t score_offset = 0;         ///< of the published scores in an id window
  std::int64_t bytes_per_token = 0;      ///< of a combine window
  std::int64_t row_bytes = 0;            ///< 4 * D
};

struct RouteArgs {
  CallState* state = nullptr;
  CallFrame* frame = nullptr;
  TileGroup* groups = nullptr;           ///< of both products, see groups_of()
  const PeerWindows* windows = nullptr;  ///< [P]
  // Scratch of the three passes.
  std::int32_t* chunk_counts = nullptr;     ///< [P * chunks, E] rows, then rows before the chunk
  std::int32_t* chunk_tokens = nullptr;     ///< [P * chunks] gathered tokens, then those before
  std::int32_t* expert_begin = nullptr;     ///< [L + 1]
  std::int64_t* rows_per_rank = nullptr;    ///< [P]
  std::int64_t* rows_per_expert = nullptr;  ///< [E]
  // Results, one entry a row of this rank.
  RowOrigin* row_origin = nullptr;
  std::uint64_t* token_row_address = nullptr;
  std::int32_t* gather_index = nullptr;         ///< -1: the row's token is this rank's own
  std::uint64_t* result_row_address = nullptr;  ///< null with combine per_rank
  std::uint64_t* gather_source = nullptr;       ///< [gather rows] addresses in peers' windows

  SumTables sums;       ///< with combine per_rank
  std::uint64_t x = 0;  ///< this rank's own x
  std::int64_t x_stride_bytes = 0;
  ScratchLimits scratch{};
  std::int64_t row_bytes = 0;      ///< 2 * D
  std::int64_t capacity_rows = 0;  ///< rows of the plan
  std::int64_t gather_rows = 0;    ///< of them, that the plan gathers at most
  std::int32_t rank = 0;
  std::int32_t num_ranks = 1;
  std::int32_t top_k = 0;
  std::int32_t num_experts = 0;
  std::int32_t first_local_expert = 0;  ///< of this rank's
  std::int32_t num_local_experts = 0;
  std::int32_t chunks_per_rank = 0;  ///< ceil(max_tokens / kRouteChunkTokens)
};

/// Once per device, outside of captures: lets the kernels use the shared memory that they need.
cudaError_t prepare_route();

/// Orders the routed rows by local expert, source rank, token, k (the CPU's order, bit by bit),
/// finds bad ids and exceeded capacity (equally on every rank) and fills the frame. Call after the
/// barrier PeerBarrier::kPublished.
cudaError_t launch_route(const RouteArgs& args, cudaStream_t stream);

}  // namespace distmoe::cuda
