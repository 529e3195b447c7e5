// SPDX-License-Identifier: Apache-2.0
//
// Dot product of two BF16 rows by one warp: lane l takes the 16-byte vectors l, l + 32, ... one
// after the other, element by element, then halves are added. Wherever a score's gradient is
// computed its sum has this order, so that its bits do not depend on the place.
#pragma once

#include <cstdint>

namespace distmoe::cuda {

/// sum + a * b over eight elements; each product and sum rounds on its own.
__device__ __forceinline__ float add_products(float sum, const uint4& a, const uint4& b) {
  const std::uint32_t left[4] = {a.x, a.y, a.z, a.w};
  const std::uint32_t right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum =
        __fadd_rn(sum, __fmul_rn(__uint_as_float(left[i] << 16), __uint_as_float(right[i] << 16)));
    sum = __fadd_rn(sum, __fmul_rn(__uint_as_float(left[i] & 0xFFFF0000u),
                                   __uint_as_float(right[i] & 0xFFFF0000u)));
  }
  return sum;
}

/// The sum over the lanes of a warp, in every lane.
__device__ __forceinline__ float sum_of_lanes(float sum) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, half));
  }
  return sum;
}

}  // namespace distmoe::cuda
