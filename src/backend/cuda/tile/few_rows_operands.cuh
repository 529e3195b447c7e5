// SPDX-License-Identifier: Apache-2.0
//
// Token rows in and result rows out of a tile of few rows.
#pragma once

#include <cstdint>

#include "backend/cuda/tile/few_rows_storage.hpp"
#include "backend/cuda/tile/row_copies.cuh"
#include "backend/cuda/tile/tile_epilogue.cuh"

namespace distmoe::cuda {

/// Named barriers of the kernel of few rows beside those of its warpgroups' epilogues.
enum class FewRowsBarrier : int { kGather = static_cast<int>(NamedBarrier::kTailLead) + 1 };

using FewRowsGather = RowCopies<kFewTileTokens>;

/// Stores columns [column, end_column) of a tile, from pass kPass on.
template <typename Epilogue, int kN, int kPass = 0>
__device__ __forceinline__ void store_few(const GroupedGemmArgs& product, FewRowsStorage& shared,
                                          const Accumulators<kN>& acc, const TileBias& bias,
                                          int column, int end_column, const ConsumerThread& self) {
  constexpr int kFirstToken = kPass * Epilogue::kTokens;
  static_assert(kFirstToken + Epilogue::kTokens <= kFewTileTokens);
  const std::uint32_t staging = ptx::shared_address(shared.staging[self.warpgroup][kPass % 2]);
  Epilogue::template stage<kN, kPass>(product, acc, bias, staging, self);
  // Also shows the table of result rows to the warpgroup.
  sync_warpgroup(self.warpgroup);
  RowStore<Epilogue> rows(shared.result_row[self.warpgroup], column, end_column, self.thread);
  rows.load(staging, kFirstToken);
  rows.store();
  if constexpr (kFirstToken + Epilogue::kTokens < kN) {
    store_few<Epilogue, kN, kPass + 1>(product, shared, acc, bias, column, end_column, self);
  }
}

}  // namespace distmoe::cuda
