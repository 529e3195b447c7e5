// SPDX-License-Identifier: Apache-2.0
//
// Weights and token rows in, result rows out of a tile of few rows.
#pragma once

#include <cuda.h>

#include <cuda/ptx>

#include <cstdint>

#include "backend/cuda/kernels/sm90_bf16_few_rows.hpp"
#include "backend/cuda/ptx/tensor_map.cuh"
#include "backend/cuda/tile/few_rows_storage.hpp"
#include "backend/cuda/tile/row_copies.cuh"
#include "backend/cuda/tile/tile_epilogue.cuh"

namespace distmoe::cuda {

/// Named barriers of the kernel of few rows beside those of its warpgroups' epilogues.
enum class FewRowsBarrier : int { kGather = static_cast<int>(NamedBarrier::kTailLead) + 1 };

using FewRowsGather = RowCopies<kFewTileTokens>;

/// Where a stage's weights are.
__device__ __forceinline__ std::uint32_t stage_address(const FewRowsArgs& args,
                                                       const FewRowsStorage& shared, int slot) {
  return ptx::shared_address(shared.ring) + slot * args.ring.stage_bytes;
}

/// The weights of a tile, through the map of its product. NOTE: evicted first, they leave L2 to
/// tokens and results (H200, Qwen3-30B-A3B, 128 tokens: 286 -> 279 us).
class FewRowsWeights {
 public:
  __device__ FewRowsWeights(const FewRowsArgs& args, const CUtensorMap& w13_map,
                            const CUtensorMap& w2_map)
      : w13_map_(w13_map), w2_map_(w2_map), args_(args), policy_(ptx::evict_first_policy()) {}

  /// By one thread. NOTE: a whole warp that has one thread copy is too slow for tiles of 64 rows
  /// (H200, OLMoE-1B-7B, 16 tokens: 177 us instead of 162).
  __device__ __forceinline__ void load(FewRowsStorage& shared, int slot, const FewRowsTile& work,
                                       int k) const {
    const bool is_w2 = work.product == static_cast<std::int32_t>(Product::kW2);
    const int rows = is_w2 ? args_.tiles.w2_rows : args_.tiles.w13_rows;
    announce(shared, slot, rows);
    const ptx::BoxCopy copy = copy_to(shared, slot, 0);
    const int first = work.weight_tile * rows;
    if (is_w2) {
      ptx::copy_box(w2_map_, {k, first, work.expert}, copy);
    } else {
      ptx::copy_box(w13_map_, {k, 0, 0, first / 16, work.expert}, copy);
    }
  }

  /// A stage of W2 of one token, a lane for each row of h2; by a whole warp.
  __device__ __forceinline__ void load_of_routes(FewRowsStorage& shared, int slot,
                                                 const FewRowsTile& work, int k) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int rows = args_.tiles.w2_rows;
    const int copies = shared.tables.num_rows;
    if (lane == 0) announce(shared, slot, copies * rows);
    __syncwarp();
    if (lane >= copies) return;
    ptx::copy_box(w2_map_, {k, work.weight_tile * rows, shared.tables.expert_of_row[lane]},
                  copy_to(shared, slot, lane * rows));
  }

 private:
  __device__ __forceinline__ static void announce(FewRowsStorage& shared, int slot, int rows) {
    ::cuda::ptx::mbarrier_arrive_expect_tx(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                           ::cuda::ptx::space_shared, &shared.full[slot],
                                           static_cast<std::uint32_t>(rows * kRowBytes));
  }
  __device__ __forceinline__ ptx::BoxCopy copy_to(FewRowsStorage& shared, int slot, int row) const {
    return {stage_address(args_, shared, slot) + row * kRowBytes,
            ptx::shared_address(&shared.full[slot]), policy_};
  }

  const CUtensorMap& w13_map_;
  const CUtensorMap& w2_map_;
  const FewRowsArgs& args_;
  std::uint64_t policy_;
};

/// What a tile computes of a product: columns [column, end_column) of its result.
struct FewRowsPart {
  const GroupedGemmArgs& product;
  int column;
  int end_column;
};

/// Stores a tile's part, from pass kPass on.
template <typename Epilogue, int kN, int kPass = 0>
__device__ __forceinline__ void store_few(const FewRowsPart& part, FewRowsStorage& shared,
                                          const Accumulators<kN>& acc, const TileBias& bias,
                                          const ConsumerThread& self) {
  constexpr int kFirstToken = kPass * Epilogue::kTokens;
  static_assert(kFirstToken + Epilogue::kTokens <= kFewTileTokens);
  const std::uint32_t staging = ptx::shared_address(shared.staging[self.warpgroup][kPass % 2]);
  Epilogue::template stage<kN, kPass>(part.product, acc, bias, staging, self);
  // Also shows the table of result rows to the warpgroup.
  sync_warpgroup(self.warpgroup);
  RowStore<Epilogue> rows(shared.result_row[self.warpgroup], part.column, part.end_column,
                          self.thread);
  rows.load(staging, kFirstToken);
  rows.store();
  if constexpr (kFirstToken + Epilogue::kTokens < kN) {
    store_few<Epilogue, kN, kPass + 1>(part, shared, acc, bias, self);
  }
}

}  // namespace distmoe::cuda
