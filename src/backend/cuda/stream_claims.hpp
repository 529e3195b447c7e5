// SPDX-License-Identifier: Apache-2.0
//
// Which streams the ranks of this process enqueue a call on. Ranks that share a device and a stream
// would wait for kernels that stand behind their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace distmoe::cuda {

/// A rank is known by its windows, which its peers hold.
struct StreamClaim {
  const std::byte* windows = nullptr;
  int device = 0;
  const void* stream = nullptr;
  std::int64_t call = 0;  ///< counted alike by all ranks of a context
};

/// Notes where a rank enqueues a call. False, and nothing is noted, where one of `peers` enqueues
/// the same call on the same stream.
bool claim_stream(const StreamClaim& claim, std::span<const std::shared_ptr<std::byte>> peers);

/// Forgets the rank.
void forget_stream(const std::byte* windows) noexcept;

}  // namespace distmoe::cuda
