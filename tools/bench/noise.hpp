// SPDX-License-Identifier: Apache-2.0
//
// Random tensors of any size that a reference can name element by element: BF16 noise of prime
// period, so that no two rows of a matrix and no two experts are alike.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "formats/bf16.hpp"

namespace distmoe::tools {

class Noise {
 public:
  /// The largest prime below 2^23: 16 MiB of BF16.
  static constexpr std::int64_t kPeriod = 8388593;

  /// Values of mean 0 and standard deviation `scale`, close to a normal distribution.
  Noise(std::uint64_t seed, double scale);

  /// Elements [0, kPeriod); element i of a tensor is the i-th of their endless repetition.
  std::span<const BF16> period() const { return period_; }
  BF16 at(std::int64_t index) const { return period_[static_cast<std::size_t>(index % kPeriod)]; }

 private:
  std::vector<BF16> period_;
};

/// Calls piece(offset, period_offset, count) for the contiguous pieces of the period that make up
/// elements [first, first + count).
template <typename Piece>
void for_each_piece(std::int64_t first, std::int64_t count, const Piece& piece) {
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t begin = (first + done) % Noise::kPeriod;
    const std::int64_t length =
        count - done < Noise::kPeriod - begin ? count - done : Noise::kPeriod - begin;
    piece(done, begin, length);
    done += length;
  }
}

}  // namespace distmoe::tools
