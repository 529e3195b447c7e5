// SPDX-License-Identifier: Apache-2.0
//
// Post-expert RMSNorm of a row of h3: rstd = 1 / sqrt(mean(h3^2) + eps), xn = h3 * rstd. Sums over
// a row are a warp's, in the order of row_dot.cuh; every product and sum rounds on its own.
#pragma once

#include <cstdint>

#include "backend/cuda/kernels/norm_args.hpp"
#include "backend/cuda/kernels/row_dot.cuh"
#include "backend/cuda/kernels/weighted_row.cuh"

namespace distmoe::cuda {

/// 1 / sqrt(mean(h3^2) + eps) of a row of 16-byte vectors, in every lane of the warp.
__device__ __forceinline__ float inverse_rms(const uint4* h3, int num_vectors, float eps,
                                             int lane) {
  float squares = 0.0f;
  for (int vector = lane; vector < num_vectors; vector += 32) {
    const uint4 columns = h3[vector];
    squares = add_products(squares, columns, columns);
  }
  const float mean = __fdiv_rn(sum_of_lanes(squares), static_cast<float>(8 * num_vectors));
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}

/// Sums over routes of some columns, in the order in which they are added.
template <int kColumns>
class NormedSums {
 public:
  /// `first_column` of those that this thread has.
  __device__ NormedSums(const NormArgs& norm, int first_column) : uses_kahan_(norm.uses_kahan) {
    if (norm.gamma_D == nullptr) return;
    has_gain_ = true;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      gain_[i] = __bfloat162float(__float2bfloat16_rn(
          __fadd_rn(__bfloat162float(norm.gamma_D[first_column + i]), norm.gain_center)));
    }
  }

  __device__ void add(const PackedColumns<kColumns>& h3, float score, float rstd) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      float value = column_of(h3, i);
      if (has_gain_) value = __fmul_rn(value, gain_[i]);
      const float term = __fmul_rn(__fmul_rn(value, score), rstd);
      if (uses_kahan_ != 0) {
        add_compensated(i, term);
      } else {
        sums_[i] = __fadd_rn(sums_[i], term);
      }
    }
  }

  __device__ const float (&sums() const)[kColumns] { return sums_; }

 private:
  __device__ void add_compensated(int i, float value) {
    const float term = __fsub_rn(value, lost_[i]);
    const float sum = __fadd_rn(sums_[i], term);
    const float excess = __fsub_rn(__fsub_rn(sum, sums_[i]), term);
    // An infinite sum has lost nothing that could be made good: it stays what plain sums make it.
    lost_[i] = __fsub_rn(sum, sum) == 0.0f ? excess : 0.0f;
    sums_[i] = sum;
  }

  float sums_[kColumns] = {};
  float lost_[kColumns] = {};  ///< to rounding
  float gain_[kColumns] = {};
  bool has_gain_ = false;
  std::int32_t uses_kahan_;
};

/// The gradient of h3 of a route, out = bf16((wdy - xn * mean_d(xn * wdy)) * rstd) with wdy =
/// dy * score, by one warp; out may be h3. Returns the score's gradient sum_d dy * xn in every
/// lane.
__device__ __forceinline__ float pull_back_norm(const uint4* h3, const uint4* dy, float score,
                                                float eps, int num_vectors, int lane, uint4* out) {
  const float rstd = inverse_rms(h3, num_vectors, eps, lane);
  float grad_score = 0.0f;
  float along = 0.0f;
  for (int vector = lane; vector < num_vectors; vector += 32) {
    const PackedColumns<8> row = unpack(h3[vector]);
    const PackedColumns<8> grad = unpack(dy[vector]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float xn = __fmul_rn(column_of(row, i), rstd);
      const float slope = column_of(grad, i);
      grad_score = __fadd_rn(grad_score, __fmul_rn(slope, xn));
      along = __fadd_rn(along, __fmul_rn(xn, __fmul_rn(slope, score)));
    }
  }
  const float mean = __fdiv_rn(sum_of_lanes(along), static_cast<float>(8 * num_vectors));
  for (int vector = lane; vector < num_vectors; vector += 32) {
    const PackedColumns<8> row = unpack(h3[vector]);
    const PackedColumns<8> grad = unpack(dy[vector]);
    float pulled[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float xn = __fmul_rn(column_of(row, i), rstd);
      const float slope = __fmul_rn(column_of(grad, i), score);
      pulled[i] = __fmul_rn(__fsub_rn(slope, __fmul_rn(xn, mean)), rstd);
    }
    out[vector] = vector_of(round_columns(pulled));
  }
  return sum_of_lanes(grad_score);
}

}  // namespace distmoe::cuda
