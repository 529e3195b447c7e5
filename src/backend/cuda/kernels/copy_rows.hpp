// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/call_frame.hpp"
#include "backend/cuda/row_table.hpp"

namespace distmoe::cuda {

/// Which rows of a call.
enum class CopiedRows : std::int32_t {
  kGathered,  ///< num_gather_rows, one per (token, peer)
  kRouted,    ///< num_rows, one per route
};

struct CopyRowsArgs {
  const CallFrame* frame = nullptr;
  CopiedRows rows = CopiedRows::kGathered;
  std::int32_t row_bytes = 0;  ///< a multiple of 16
  RowTable from;               ///< in this rank's memory or a peer's
  RowTable to;                 ///< in this rank's memory or a peer's
};

/// Loads the kernel on the current device; once, outside of captures, before any call.
cudaError_t prepare_copy_rows();

/// Copies every row of the call from `from` to `to`; nothing where the call has failed.
cudaError_t launch_copy_rows(const CopyRowsArgs& args, int num_blocks, cudaStream_t stream);

}  // namespace distmoe::cuda
