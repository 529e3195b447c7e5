// SPDX-License-Identifier: Apache-2.0
//
// MPI counts are int; a message is cut into chunks that fit. All arithmetic is 64-bit.
#pragma once

#include <algorithm>
#include <cstdint>

namespace distmoe {

inline constexpr std::uint64_t kLargestChunkBytes = std::uint64_t{1} << 30;

struct Chunk {
  std::uint64_t offset;  // bytes from the start of the message
  int bytes;             // 1 .. kLargestChunkBytes
};

/// How many chunks a message of `bytes` is cut into; none where it is empty.
constexpr std::uint64_t num_chunks(std::uint64_t bytes) {
  return bytes / kLargestChunkBytes + (bytes % kLargestChunkBytes != 0 ? 1 : 0);
}

/// Chunk `index` (< num_chunks) of a message of `bytes`. All but the last have the largest size.
constexpr Chunk chunk_at(std::uint64_t bytes, std::uint64_t index) {
  const std::uint64_t offset = index * kLargestChunkBytes;
  return {offset, static_cast<int>(std::min(bytes - offset, kLargestChunkBytes))};
}

}  // namespace distmoe
