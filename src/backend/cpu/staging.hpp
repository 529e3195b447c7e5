// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace distmoe::cpu {

/// Cuts the front of `buffer` into consecutive blocks, one a rank: count(rank) elements of
/// `element_bytes` each.
template <typename Count>
std::vector<std::span<std::byte>> blocks_of(std::span<std::byte> buffer, int size,
                                            std::size_t element_bytes, const Count& count) {
  std::vector<std::span<std::byte>> blocks;
  for (int peer = 0; peer < size; ++peer) {
    const std::size_t bytes = static_cast<std::size_t>(count(peer)) * element_bytes;
    blocks.push_back(buffer.first(bytes));
    buffer = buffer.subspan(bytes);
  }
  return blocks;
}

/// The same blocks as a sender passes them.
inline std::vector<std::span<const std::byte>> as_sent(
    const std::vector<std::span<std::byte>>& blocks) {
  return {blocks.begin(), blocks.end()};
}

}  // namespace distmoe::cpu
