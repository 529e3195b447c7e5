// SPDX-License-Identifier: Apache-2.0
#include "bench/read_streams.hpp"

#include <cstring>

#include "core/simd.hpp"

namespace distmoe::tools {
namespace {

// NOTE: two cores of a Zen 4: 1 stream 24, 4 streams 30, 8 streams 29 to 31 GB/s; one core: 17, 21,
// 22. Prefetching by hand added nothing.
constexpr std::size_t kStreams = 8;
constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kWords = kLineBytes / sizeof(std::uint64_t);

}  // namespace

DISTMOE_SIMD_CLONES
std::uint64_t read_streams(const std::byte* data, std::size_t num_bytes) {
  const std::size_t part = num_bytes / kStreams / kLineBytes * kLineBytes;
  std::uint64_t folded[kWords] = {};
  for (std::size_t i = 0; i < part; i += kLineBytes) {
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
      std::uint64_t words[kWords];
      std::memcpy(words, data + stream * part + i, kLineBytes);
      for (std::size_t w = 0; w < kWords; ++w) folded[w] ^= words[w];
    }
  }
  std::uint64_t all = 0;
  for (const std::uint64_t word : folded) all ^= word;
  return all;
}

}  // namespace distmoe::tools
