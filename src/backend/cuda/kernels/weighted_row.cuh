// SPDX-License-Identifier: Apache-2.0
//
// Weighted sums of rows over routes, some columns a thread. The product and the sum each round
// once, as the CPU's do.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace distmoe::cuda {

/// What a thread reads of a BF16 row at a time.
template <int kColumns>
struct PackedColumns {
  std::uint32_t words[kColumns / 2];
};

__device__ __forceinline__ PackedColumns<8> unpack(const uint4& vector) {
  return {{vector.x, vector.y, vector.z, vector.w}};
}
__device__ __forceinline__ PackedColumns<4> unpack(const uint2& vector) {
  return {{vector.x, vector.y}};
}
__device__ __forceinline__ uint4 vector_of(const PackedColumns<8>& row) {
  return {row.words[0], row.words[1], row.words[2], row.words[3]};
}

/// Column i of those that a thread reads.
template <int kColumns>
__device__ __forceinline__ float column_of(const PackedColumns<kColumns>& row, int i) {
  const std::uint32_t word = row.words[i / 2];
  return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xFFFF0000u);
}

/// sums += fp32(row) * score
template <int kColumns>
__device__ __forceinline__ void add_scaled(const PackedColumns<kColumns>& row, float score,
                                           float (&sums)[kColumns]) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const float low = __uint_as_float(row.words[i] << 16);
    const float high = __uint_as_float(row.words[i] & 0xFFFF0000u);
    sums[2 * i] = __fadd_rn(sums[2 * i], __fmul_rn(low, score));
    sums[2 * i + 1] = __fadd_rn(sums[2 * i + 1], __fmul_rn(high, score));
  }
}

/// out = fp32(row) * score
template <int kColumns>
__device__ __forceinline__ void scale_columns(const PackedColumns<kColumns>& row, float score,
                                              float (&out)[kColumns]) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    out[2 * i] = __fmul_rn(__uint_as_float(row.words[i] << 16), score);
    out[2 * i + 1] = __fmul_rn(__uint_as_float(row.words[i] & 0xFFFF0000u), score);
  }
}

/// Rounds once to BF16.
template <int kColumns>
__device__ __forceinline__ PackedColumns<kColumns> round_columns(const float (&sums)[kColumns]) {
  PackedColumns<kColumns> row;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(sums[2 * i], sums[2 * i + 1]);
    row.words[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
  }
  return row;
}

}  // namespace distmoe::cuda
