// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "formats/bf16.hpp"

namespace distmoe::tools {

/// xorshift64*: quick, since a layer has 300 million weights.
class RandomBits {
 public:
  explicit RandomBits(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  std::uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1Du;
  }
  std::uint64_t below(std::uint64_t bound) { return (next() >> 32) % bound; }
  /// In [-1, 1).
  float unit() { return static_cast<float>(static_cast<std::int64_t>(next()) >> 40) * 0x1p-23f; }

 private:
  std::uint64_t state_;
};

inline void fill_random(std::span<float> values, std::uint64_t seed, float scale = 1.0f) {
  RandomBits random(seed);
  for (float& value : values) value = scale * random.unit();
}

inline void fill_random(std::span<BF16> values, std::uint64_t seed, float scale = 1.0f) {
  RandomBits random(seed);
  for (BF16& value : values) value = to_bf16(scale * random.unit());
}

}  // namespace distmoe::tools
