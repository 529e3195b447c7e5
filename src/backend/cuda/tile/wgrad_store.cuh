// SPDX-License-Identifier: Apache-2.0
//
// From accumulators to rows of a weight's gradient, BF16 or FP32, over what is there or added to
// it. A lane holds two neighbouring columns of each block of eight.
//
//   store_staged    through shared memory, by bulk stores of boxes of 64 rows x 128 bytes
//   store_gradient  from registers: four lanes exchange blocks until each has 16 bytes of a row
#pragma once

#include <cuda_bf16.h>

#include <cuda/ptx>

#include <cstdint>

#include "backend/cuda/kernels/sm90_bf16_wgrad.hpp"
#include "backend/cuda/ptx/shared_copy.cuh"
#include "backend/cuda/tile/named_barrier.cuh"
#include "backend/cuda/tile/wgrad_storage.hpp"

namespace distmoe::cuda {

/// Of a consumer thread; layout at ptx::Wgmma.
using WgradAccumulators = float[2][kWgradN / 2];

/// What a store does.
template <bool kWritesFloat, bool kAdds, bool kStages>
struct WgradPolicy {
  static constexpr bool kIsFloat = kWritesFloat;
  static constexpr bool kAccumulates = kAdds;
  static constexpr bool kIsStaged = kStages;
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

/// Columns of a box of a fresh gradient.
template <bool kIsFloat>
inline constexpr int kGradientBoxColumns = kRowBytes / (kIsFloat ? 4 : 2);

/// By the thread that issued them: the boxes staged before have been read.
__device__ __forceinline__ void wait_for_bulk_reads() {
  ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<0>{});
}

/// Rows 64 i to 64 i + 63 of a warpgroup's tile, boxes of columns from `first_block` of eight on.
/// Chunks of 16 bytes lie as the map's swizzle has them: chunk c of row r at c ^ (r % 8).
template <bool kIsFloat>
__device__ __forceinline__ void stage_gradient(const float* acc, int first_block,
                                               std::uint32_t staging, const ConsumerThread& self) {
  constexpr int kBlocksPerBox = kGradientBoxColumns<kIsFloat> / 8;
#pragma unroll
  for (int b = 0; b < kGradientBoxes * kBlocksPerBox; b += 2) {
    const float* pair = acc + 4 * (first_block + b);
    if constexpr (kIsFloat) {
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        const int block = b + h / 2;
        const int row = 16 * self.warp + 8 * (h % 2) + self.lane / 4;
        const int chunk = block % kBlocksPerBox * 2 + self.lane % 4 / 2;
        ptx::store_shared_8(staging + block / kBlocksPerBox * kGradientBoxBytes + row * kRowBytes +
                                ((chunk ^ (row & 7)) << 4) + self.lane % 2 * 8,
                            pair[2 * h], pair[2 * h + 1]);
      }
    } else {
      const int matrix = self.lane / 8;
      const int block = b + matrix / 2;
      const int row = 16 * self.warp + 8 * (matrix % 2) + self.lane % 8;
      const std::uint32_t values[4] = {
          rounded_pair(pair[0], pair[1]), rounded_pair(pair[2], pair[3]),
          rounded_pair(pair[4], pair[5]), rounded_pair(pair[6], pair[7])};
      ptx::stmatrix_x4(staging + block / kBlocksPerBox * kGradientBoxBytes + row * kRowBytes +
                           ((block % kBlocksPerBox ^ (row & 7)) << 4),
                       values);
    }
  }
}

/// The staged boxes to their place, by one thread.
template <bool kIsFloat>
__device__ __forceinline__ void store_boxes(const WgradArgs& args, const WgradMaps& maps,
                                            const GradientPlace& place,
                                            const std::uint8_t* staging) {
  const auto half_rows = static_cast<int>(rows_of_half(args.out, args.m));
  const bool is_second = place.m >= half_rows;
  const CUtensorMap& out = is_second ? maps.second_half : maps.out;
  for (int box = 0; box < kGradientBoxes && place.m < args.m; ++box) {
    const int column = place.n + box * kGradientBoxColumns<kIsFloat>;
    if (column >= args.n) break;
    const std::int32_t at[3] = {column, is_second ? place.m - half_rows : place.m, place.expert};
    ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_global, ::cuda::ptx::space_shared, &out,
                                      at, staging + box * kGradientBoxBytes);
  }
  ::cuda::ptx::cp_async_bulk_commit_group();
}

/// A fresh gradient, through shared memory.
template <bool kIsFloat>
__device__ __forceinline__ void store_staged(const WgradArgs& args, const WgradMaps& maps,
                                             const WgradAccumulators& acc,
                                             const GradientPlace& place, WgradStorage& shared,
                                             const ConsumerThread& self) {
  constexpr int kColumns = kGradientBoxes * kGradientBoxColumns<kIsFloat>;
  std::uint8_t* staging = shared.staging[self.warpgroup];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int column = 0; column < kWgradN; column += kColumns) {
      if (self.thread == 0) wait_for_bulk_reads();
      sync_warpgroup(self.warpgroup);
      stage_gradient<kIsFloat>(acc[i], column / 8, ptx::shared_address(staging), self);
      // Bulk stores read through the async proxy.
      ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
      sync_warpgroup(self.warpgroup);
      if (self.thread == 0) {
        store_boxes<kIsFloat>(args, maps,
                              {place.expert, place.m + kGradientBoxRows * i, place.n + column},
                              staging);
      }
    }
  }
}

}  // namespace distmoe::cuda
