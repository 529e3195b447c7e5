// SPDX-License-Identifier: Apache-2.0
//
// From accumulators to rows of a weight's gradient, BF16 or FP32, over what is there or added to
// it, from registers: four lanes exchange blocks of eight columns until each has 16 bytes of a row.
// A lane holds two neighbouring columns of each block.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "backend/cuda/kernels/sm90_bf16_wgrad.hpp"
#include "backend/cuda/tile/named_barrier.cuh"
#include "backend/cuda/tile/wgrad_storage.hpp"

namespace distmoe::cuda {

/// Of a consumer thread; layout at ptx::Wgmma.
using WgradAccumulators = float[2][kWgradN / 2];

/// What a store does.
template <bool kWritesFloat, bool kAdds, bool kStoresBoxes>
struct WgradPolicy {
  static constexpr bool kIsFloat = kWritesFloat;
  static constexpr bool kAccumulates = kAdds;
  static constexpr bool kHasBoxes = kStoresBoxes;

  /// What is added to needs room for half of a tile in FP32, or all of it in BF16. NOTE: FP32 alone
  /// gains 2 % from a third box (H200, 512 rows an expert).
  using Storage = WgradStorage<kAdds ? 4 : kWritesFloat ? 3 : 2>;
};

/// value[b] of lane q of a quad becomes value[q] of lane b. Its own inverse.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&value)[4], int lane) {
  const bool is_odd = (lane & 1) != 0;
  const bool is_upper = (lane & 2) != 0;
#pragma unroll
  for (int b = 0; b < 4; b += 2) {
    const std::uint32_t got = __shfl_xor_sync(~0u, is_odd ? value[b] : value[b + 1], 1);
    (is_odd ? value[b] : value[b + 1]) = got;
  }
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const std::uint32_t got = __shfl_xor_sync(~0u, is_upper ? value[b] : value[b + 2], 2);
    (is_upper ? value[b] : value[b + 2]) = got;
  }
}

__device__ __forceinline__ std::uint32_t rounded_pair(float low, float high) {
  const __nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(packed);
}

/// Four blocks of eight columns of one row as BF16: a lane stores block lane % 4.
template <bool kAccumulates>
__device__ __forceinline__ void store_blocks_bf16(std::uint64_t row, int column, int width,
                                                  const float* acc, int lane) {
  const int own = column + 8 * (lane % 4);
  auto* out = reinterpret_cast<uint4*>(row + own * 2);
  std::uint32_t there[4] = {};
  if constexpr (kAccumulates) {
    if (own < width) {
      const uint4 vector = *out;
      there[0] = vector.x, there[1] = vector.y, there[2] = vector.z, there[3] = vector.w;
    }
    transpose_quad(there, lane);
  }
  std::uint32_t value[4];
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    float low = acc[4 * b];
    float high = acc[4 * b + 1];
    if constexpr (kAccumulates) {
      low = __fadd_rn(__uint_as_float(there[b] << 16), low);
      high = __fadd_rn(__uint_as_float(there[b] & 0xFFFF0000u), high);
    }
    value[b] = rounded_pair(low, high);
  }
  transpose_quad(value, lane);
  if (own < width) *out = {value[0], value[1], value[2], value[3]};
}

/// Two blocks of eight columns of one row as FP32: even lanes store of the first, odd ones of the
/// second.
template <bool kAccumulates>
__device__ __forceinline__ void store_blocks_float(std::uint64_t row, int column, int width,
                                                   const float* acc, int lane) {
  const bool is_odd = (lane & 1) != 0;
  const int own = column + 8 * (lane & 1) + 4 * (lane % 4 / 2);
  const float got0 = __shfl_xor_sync(~0u, is_odd ? acc[0] : acc[4], 1);
  const float got1 = __shfl_xor_sync(~0u, is_odd ? acc[1] : acc[5], 1);
  if (own >= width) return;
  float4 value = is_odd ? float4{got0, got1, acc[4], acc[5]} : float4{acc[0], acc[1], got0, got1};
  auto* out = reinterpret_cast<float4*>(row + static_cast<std::int64_t>(own) * 4);
  if constexpr (kAccumulates) {
    const float4 there = *out;
    value = {__fadd_rn(there.x, value.x), __fadd_rn(there.y, value.y), __fadd_rn(there.z, value.z),
             __fadd_rn(there.w, value.w)};
  }
  *out = value;
}

/// Where row m of an expert's gradient starts.
template <bool kIsFloat>
__device__ __forceinline__ std::uint64_t gradient_row(const WgradArgs& args, int expert, int m) {
  const int half = args.out.interleaved_rows;
  const int position = half == 0 ? m : m < half ? 2 * m : 2 * (m - half) + 1;
  return reinterpret_cast<std::uint64_t>(args.out.data) +
         (static_cast<std::int64_t>(expert) * args.m + position) * args.n * (kIsFloat ? 4 : 2);
}

/// Rows m to m + 127 and columns n to n + 127 of an expert, a warpgroup's.
struct GradientPlace {
  int expert;
  int m;
  int n;
};

__device__ __forceinline__ bool is_inside(const WgradArgs& args, const GradientPlace& place) {
  return place.m < args.m && place.n < args.n;
}

template <typename Policy>
__device__ __forceinline__ void store_gradient(const WgradArgs& args, const WgradAccumulators& acc,
                                               const GradientPlace& place,
                                               const ConsumerThread& self) {
  const auto [expert, m, n] = place;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row_m = m + 64 * i + 16 * self.warp + 8 * h + self.lane / 4;
      // Lanes of a quad have the same row; those of others exchange with nobody here.
      const std::uint64_t row = gradient_row<Policy::kIsFloat>(args, expert, row_m);
      const int width = row_m < args.m ? args.n : 0;
      if constexpr (Policy::kIsFloat) {
#pragma unroll
        for (int block = 0; block < kWgradN / 8; block += 2) {
          const float pair[8] = {
              acc[i][4 * block + 2 * h],     acc[i][4 * block + 2 * h + 1], 0, 0,
              acc[i][4 * block + 4 + 2 * h], acc[i][4 * block + 5 + 2 * h], 0, 0};
          store_blocks_float<Policy::kAccumulates>(row, n + 8 * block, width, pair, self.lane);
        }
      } else {
#pragma unroll
        for (int block = 0; block < kWgradN / 8; block += 4) {
          float values[16];
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            values[4 * b] = acc[i][4 * (block + b) + 2 * h];
            values[4 * b + 1] = acc[i][4 * (block + b) + 2 * h + 1];
          }
          store_blocks_bf16<Policy::kAccumulates>(row, n + 8 * block, width, values, self.lane);
        }
      }
    }
  }
}

}  // namespace distmoe::cuda
