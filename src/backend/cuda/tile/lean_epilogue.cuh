// SPDX-License-Identifier: Apache-2.0
//
// W2's DGRAD where h3 is not kept: dy comes unscaled, so that a = W2^T dy gives the score's
// gradient as well, sum_f a h2, and grad_h2 = bf16(a score). a stays FP32: it goes through staging
// unrounded, eight tokens a pass.
#pragma once

#include "backend/cuda/tile/grad_epilogue.cuh"

namespace distmoe::cuda {

/// Eight columns of one row a thread; sixteen lanes have a row and add what they find of its score.
template <bool kIsClamped>
class LeanGradientStore {
 public:
  static constexpr int kChunks = kWeightRowsPerWarpgroup / 8;
  static_assert(kWarpgroupThreads == 8 * kChunks);

  __device__ __forceinline__ LeanGradientStore(const GroupedGemmArgs& args,
                                               const std::uint64_t* result_row, int column,
                                               int row_begin, int thread)
      : args_(args), result_row_(result_row + thread / kChunks) {
    const int token = thread / kChunks;
    const int chunk = thread % kChunks;
    offset_ = token * kWeightRowsPerWarpgroup * 4 + ((chunk ^ (token / 2)) << 5);
    column_bytes_ = (column + chunk * 8) * 2;
    is_stored_ = column + chunk * 8 < args.m;
    row_begin_ = row_begin + token;
    part_ = column / kWeightRowsPerWarpgroup;
    h1_ = *args.h1;
    grad_h1_ = args.frame->scratch.h1;
    h2_begin_ = base_of(args.result);
    scores_ = lean_scores(*args.frame);
  }

  template <int kStream>
  __device__ __forceinline__ void load(std::uint32_t staging, int first_token) {
    a_[0] = ptx::load_shared_16(staging + offset_);
    a_[1] = ptx::load_shared_16(staging + offset_ + 16);
    const std::uint64_t h2_row = result_row_[first_token];
    row_ = h2_row != 0 ? row_begin_ + first_token : -1;
    h2_ = is_stored_ && h2_row != 0 ? h2_row + column_bytes_ : 0;
    gate_ = up_ = uint4{0, 0, 0, 0};
    if (h2_ == 0) return;
    const std::uint64_t gate = h1_ + h1_offset();
    gate_ = *reinterpret_cast<const uint4*>(gate);
    up_ = *reinterpret_cast<const uint4*>(gate + args_.m * 2);
  }

  __device__ __forceinline__ void store() const {
    float sum = 0.0f;
    if (h2_ != 0) {
      const float score = scores_.of_rows[row_];
      const HiddenGradients x = take_back(score, gate_.x, up_.x, a_[0].x, a_[0].y, sum);
      const HiddenGradients y = take_back(score, gate_.y, up_.y, a_[0].z, a_[0].w, sum);
      const HiddenGradients z = take_back(score, gate_.z, up_.z, a_[1].x, a_[1].y, sum);
      const HiddenGradients w = take_back(score, gate_.w, up_.w, a_[1].z, a_[1].w, sum);
      const uint4 grad_gate = {x.grad_gate, y.grad_gate, z.grad_gate, w.grad_gate};
      const uint4 grad_up = {x.grad_up, y.grad_up, z.grad_up, w.grad_up};
      const uint4 h2 = {x.h2, y.h2, z.h2, w.h2};
      const std::uint64_t out = grad_h1_ + h1_offset();
      *reinterpret_cast<uint4*>(out) = grad_gate;
      *reinterpret_cast<uint4*>(out + args_.m * 2) = grad_up;
      *reinterpret_cast<uint4*>(h2_) = h2;
    }
#pragma unroll
    for (int half = kChunks / 2; half > 0; half /= 2) {
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, half));
    }
    if (row_ >= 0 && threadIdx.x % kChunks == 0) {
      scores_.parts[static_cast<std::int64_t>(row_) * args_.num_score_parts + part_] = sum;
    }
  }

 private:
  /// Rows of h1 are twice as wide as those of h2.
  __device__ __forceinline__ std::int64_t h1_offset() const {
    return 2 * static_cast<std::int64_t>(h2_ - h2_begin_) - column_bytes_;
  }
  /// Two neighbouring columns, BF16.
  struct HiddenGradients {
    std::uint32_t grad_gate;
    std::uint32_t grad_up;
    std::uint32_t h2;
  };
  /// Adds their part of the score's gradient to sum.
  __device__ __forceinline__ HiddenGradients take_back(float score, std::uint32_t gate, std::uint32_t up,
                                                  std::uint32_t a_low, std::uint32_t a_high,
                                                  float& sum) const {
    const float low = __uint_as_float(a_low);
    const float high = __uint_as_float(a_high);
    const std::uint32_t grad = pack_bf16(__fmul_rn(low, score), __fmul_rn(high, score));
    const SwigluGradient first =
        swiglu_gradient<kIsClamped>(low_bf16(gate), low_bf16(up), low_bf16(grad), args_.swiglu);
    const SwigluGradient second =
        swiglu_gradient<kIsClamped>(high_bf16(gate), high_bf16(up), high_bf16(grad), args_.swiglu);
    const std::uint32_t h2 = pack_bf16(first.h2, second.h2);
    sum = __fadd_rn(sum, __fmul_rn(low, low_bf16(h2)));
    sum = __fadd_rn(sum, __fmul_rn(high, high_bf16(h2)));
    return {pack_bf16(first.gate, second.gate), pack_bf16(first.up, second.up), h2};
  }

  const GroupedGemmArgs& args_;
  const std::uint64_t* result_row_;
  std::uint64_t h1_;
  std::uint64_t grad_h1_;
  std::uint64_t h2_begin_;
  LeanScores scores_;
  std::uint64_t h2_ = 0;  ///< where it goes; 0: nowhere
  std::uint32_t offset_;
  int column_bytes_;
  int row_begin_;
  int row_ = -1;
  int part_;
  bool is_stored_;
  uint4 a_[2];
  uint4 gate_;
  uint4 up_;
};

template <bool kIsClamped>
struct LeanGradientEpilogue {
  using Store = LeanGradientStore<kIsClamped>;
  static constexpr int kStreams = 1;
  static constexpr int kColumns = kWeightRowsPerWarpgroup;
  static constexpr int kTokens = kStagingBytes / (kColumns * 4);
  static_assert(kTokens == kTileRowStep);

  static __device__ TileBias load_bias(const GroupedGemmArgs&, int, int, const ConsumerThread&) {
    return {};
  }

  /// Groups of eight columns of token t lie t / 2 groups off, by exclusive or: the lanes that store
  /// together, of four tokens, then have banks of their own.
  template <int kN, int kPass>
  static __device__ __forceinline__ void stage(const GroupedGemmArgs&, const Accumulators<kN>& acc,
                                               const TileBias&, std::uint32_t staging,
                                               const ConsumerThread& self) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int group = 8 * i + 2 * self.warp + h;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int token = 2 * (self.lane % 4) + j;
          ptx::store_shared_4(
              staging + token * kColumns * 4 + ((group ^ (token / 2)) << 5) + self.lane / 4 * 4,
              acc[i][4 * kPass + 2 * h + j]);
        }
      }
    }
  }
};

}  // namespace distmoe::cuda
