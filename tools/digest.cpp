// SPDX-License-Identifier: Apache-2.0
#include "digest.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace distmoe::tools {
namespace {

// Every step is a bijection of the state for a given word and of the word for a given state, so
// that two inputs of one length which differ in a single word never share a digest.
std::uint64_t mix(std::uint64_t state, std::uint64_t word, std::uint64_t odd_factor) {
  state = (state ^ word) * odd_factor;
  return state ^ (state >> 32);
}

}  // namespace

Digest digest_of(std::span<const std::byte> bytes) {
  Digest digest{bytes.size(), ~std::uint64_t{bytes.size()}};
  for (std::size_t offset = 0; offset < bytes.size(); offset += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + offset, std::min(sizeof word, bytes.size() - offset));
    digest.low = mix(digest.low, word, 0x9e3779b97f4a7c15);
    digest.high = mix(digest.high, std::rotl(word, 29), 0xc2b2ae3d27d4eb4f);
  }
  return digest;
}

}  // namespace distmoe::tools
