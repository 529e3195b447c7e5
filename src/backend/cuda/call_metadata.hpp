// SPDX-License-Identifier: Apache-2.0
//
// What a call keeps of its routing, in device memory. A saving call has a set of its own, which
// lives until its backward; calls without a backward share one.
#pragma once

#include <cstdint>

#include "backend/cuda/device_memory.hpp"
#include "layout/row_origin.hpp"

namespace distmoe::cuda {

struct CallMetadata {
  std::int32_t* expert_begin = nullptr;         ///< [L + 1]
  std::int64_t* rows_per_rank = nullptr;        ///< [P]
  std::int64_t* rows_per_expert = nullptr;      ///< [E]
  RowOrigin* row_origin = nullptr;              ///< [R]
  std::uint64_t* token_row_address = nullptr;   ///< [R]
  std::uint64_t* result_row_address = nullptr;  ///< [R]; null with combine per_rank
  std::int32_t* gather_index = nullptr;         ///< [R]
  std::uint64_t* gather_source = nullptr;       ///< [gather rows]
  // Of saving calls alone: what the next call overwrites.
  std::int64_t* tokens = nullptr;  ///< [P]
  std::int32_t* ids = nullptr;     ///< [T, K]
  float* scores = nullptr;         ///< [T, K]
};

/// The set of calls without a backward.
CallMetadata forward_only_metadata(const DeviceMemory& memory);
/// Set `index` of `count`; index is slot * N + layer.
CallMetadata saved_metadata(const DeviceMemory& memory, std::int64_t index, std::int64_t count);

}  // namespace distmoe::cuda
