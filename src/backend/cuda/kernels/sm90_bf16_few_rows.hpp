// SPDX-License-Identifier: Apache-2.0
//
// Host side of the kernel that makes both products of a forward call of few rows in one launch, and
// on a rank without peers the whole call; see sm90_bf16_few_rows.cuh for its contract.
#pragma once

#include "backend/cuda/kernels/call_state.hpp"
#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.hpp"
#include "backend/cuda/tile/few_rows_storage.hpp"
#include "layout/row_origin.hpp"

namespace distmoe::cuda {

/// What the host reads of a call's routing, see RouteArgs.
struct RoutingRecord {
  RowOrigin* row_origin = nullptr;             ///< [R]
  std::uint64_t* token_row_address = nullptr;  ///< [R]
  std::int32_t* expert_begin = nullptr;        ///< [E + 1]
  std::int64_t* rows_per_rank = nullptr;       ///< [1]
  std::int64_t* rows_per_expert = nullptr;     ///< [E]
};

struct FewRowsArgs {
  CallFrame* frame = nullptr;
  FewRowsCounters* counters = nullptr;
  FewRowsTiles tiles;
  FewRowsRing ring;
  /// 1: the routing kernels ran before, and other kernels combine. Tokens and results are found
  /// through the products' tables, rows of peers as pull says, and what follows w13 and w2 below is
  /// not read.
  std::int32_t has_peers = 0;
  std::int32_t most_rows = 0;  ///< with peers: a call of more rows is left as it is
  std::int32_t top_k = 0;
  /// Of w13.frame, w13.groups, w2.frame and, without peers, of the groups and tables but h2,
  /// nothing is read.
  GroupedGemmArgs w13;
  GroupedGemmArgs w2;

  std::int64_t call = 0;  ///< see CallHead
  CallState* state = nullptr;
  /// [tiles of W2's rows, T]: results that a token has in a tile's columns; 0 between calls.
  std::uint32_t* arrivals = nullptr;
  RoutingRecord record{};
  std::int64_t capacity_rows = 0;  ///< rows of the plan
  const void* ids = nullptr;       ///< [T, K]
  std::int64_t id_token_stride = 0;
  std::int64_t id_k_stride = 0;
  const void* scores = nullptr;  ///< [T, K]
  std::int64_t score_token_stride = 0;
  std::int64_t score_k_stride = 0;
  std::int32_t ids_are_64_bit = 0;
  std::int32_t scores_are_bf16 = 0;
  std::uint64_t x = 0;  ///< BF16 [T, D]
  std::int64_t x_stride_bytes = 0;
  std::uint64_t y = 0;  ///< BF16 [T, D]
  std::int64_t y_stride_bytes = 0;
  std::int32_t num_tokens = 0;
  std::int32_t num_experts = 0;
};

/// Loads the kernels and raises their shared memory limit; once per device, outside of captures.
cudaError_t prepare_few_rows();

/// Without peers the whole call: its fault or y. With peers both products. Weights through maps of
/// args.tiles rows. Any number of blocks, one an SM.
cudaError_t launch_few_rows(const FewRowsArgs& args, const CUtensorMap& w13_map,
                            const CUtensorMap& w2_map, int num_blocks, cudaStream_t stream);

}  // namespace distmoe::cuda
