// SPDX-License-Identifier: Apache-2.0
//
// 64-bit arithmetic of sizes: an overflow is invalid_argument, never a wrap.
#pragma once

#include <cstdint>
#include <limits>

#include "core/check.hpp"

namespace distmoe {

inline std::int64_t checked_add(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  DISTMOE_CHECK(!__builtin_add_overflow(a, b, &sum), kInvalidArgument,
                "a size does not fit in 64 bits: ", a, " + ", b);
  return sum;
}

inline std::int64_t checked_mul(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  DISTMOE_CHECK(!__builtin_mul_overflow(a, b, &product), kInvalidArgument,
                "a size does not fit in 64 bits: ", a, " * ", b);
  return product;
}

/// The product of several factors, checked.
template <typename... Factors>
std::int64_t checked_product(std::int64_t first, Factors... factors) {
  ((first = checked_mul(first, factors)), ...);
  return first;
}

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0); }

/// Every region of a context starts at a multiple of this many bytes.
inline constexpr std::int64_t kRegionAlignment = 128;

/// `bytes` rounded up to kRegionAlignment.
inline std::int64_t align_up(std::int64_t bytes) {
  return checked_mul(ceil_div(bytes, kRegionAlignment), kRegionAlignment);
}

}  // namespace distmoe
