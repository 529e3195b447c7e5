// SPDX-License-Identifier: Apache-2.0
#include "bench/noise.hpp"

#include <cmath>

#include "bench/random_values.hpp"

namespace distmoe::tools {

Noise::Noise(std::uint64_t seed, double scale) {
  RandomBits random(seed);
  // The sum of four uniform numbers of [0, 2^16): mean 2 * 2^16, variance 4 / 12 * 2^32.
  const double factor = scale * std::sqrt(3.0) * 0x1p-16;
  period_.reserve(kPeriod);
  for (std::int64_t i = 0; i < kPeriod; ++i) {
    const std::uint64_t bits = random.next();
    const auto part = [&](int shift) { return static_cast<double>((bits >> shift) & 0xFFFFu); };
    const double sum = part(0) + part(16) + part(32) + part(48) + 2.0;  // of midpoints
    period_.push_back(to_bf16(static_cast<float>(factor * (sum - 0x1p17))));
  }
}

}  // namespace distmoe::tools
