// SPDX-License-Identifier: Apache-2.0
//
// Epilogues of training: W13 that keeps h1 beside h2, and W2's DGRAD, which takes grad_h2 through
// SwiGLU to grad_h1 while it is on chip.
#pragma once

#include "backend/cuda/tile/tile_epilogue.cuh"

namespace distmoe::cuda {

/// Rows of h2 and, in two more passes over the same tokens, of gate and up of h1.
template <typename Epilogue>
class H1Store : public RowStore<Epilogue> {
  using Base = RowStore<Epilogue>;
  using Base::kSteps;
  using Base::kTokenStep;
  using Base::row_;

 public:
  __device__ __forceinline__ H1Store(const GroupedGemmArgs& args, const std::uint64_t* result_row,
                                     int column, int row_begin, int thread)
      : Base(result_row, column, args.m / 2, thread), half_bytes_(args.m) {
    const std::uint64_t h1 = *args.h1;
    keeps_h1_ = h1 != 0;
    h1_row_ = h1 + static_cast<std::int64_t>(row_begin + this->staged_.token) * 2 * half_bytes_;
  }

  template <int kStream>
  __device__ __forceinline__ void load(std::uint32_t staging, int first_token) {
    Base::load(staging, first_token);
    if constexpr (kStream == 0) return;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const bool is_row = row_[step] != 0 && keeps_h1_;
      row_[step] =
          is_row ? h1_row_ + (kStream - 1) * half_bytes_ +
                       static_cast<std::int64_t>(first_token + step * kTokenStep) * 2 * half_bytes_
                 : 0;
    }
  }

 private:
  std::uint64_t h1_row_;
  int half_bytes_;  ///< of a row of h1: m / 2 elements
  bool keeps_h1_;
};

/// What W13 does with accumulators where h1 is kept: the bits of h2 are SwigluEpilogue's.
template <bool kIsClamped>
struct SavingSwigluEpilogue {
  using Base = SwigluEpilogue<kIsClamped>;
  using Store = H1Store<SavingSwigluEpilogue>;
  static constexpr int kStreams = 3;  ///< h2, gate, up
  static constexpr int kColumns = Base::kColumns;
  static constexpr int kTokens = Base::kTokens;
  static constexpr int kBlocks = Base::kBlocks;

  static __device__ TileBias load_bias(const GroupedGemmArgs& args, int expert, int column,
                                       const ConsumerThread& self) {
    return Base::load_bias(args, expert, column, self);
  }

  template <int kN, int kPass>
  static __device__ __forceinline__ void stage(const GroupedGemmArgs& args,
                                               const Accumulators<kN>& acc, const TileBias& bias,
                                               std::uint32_t staging, const ConsumerThread& self) {
    constexpr int kStream = kPass % kStreams;
    if constexpr (kStream == 0) {
      Base::template stage<kN, kPass / kStreams>(args, acc, bias, staging, self);
    } else {
      stage_half<kN, kPass / kStreams, kStream - 1>(acc, bias, staging, self);
    }
  }

 private:
  /// Gate (half 0) or up (1), as they are stored.
  template <int kN, int kPass, int kHalf>
  static __device__ __forceinline__ void stage_half(const Accumulators<kN>& acc,
                                                    const TileBias& bias, std::uint32_t staging,
                                                    const ConsumerThread& self) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint32_t matrix[kBlocks];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        constexpr int kLast = kN / 8;
        const int block = kPass * kBlocks + b;
        matrix[b] = 0;
        if (block >= kLast) continue;
        const float* d = &acc[i][4 * block + 2 * kHalf];
        matrix[b] = pack_bf16(d[0] + bias.value[i][kHalf], d[1] + bias.value[i][kHalf]);
      }
      const int chunk = 4 * i + self.warp;
      ptx::stmatrix_x4_trans(staging + self.lane * kColumns * 2 + ((chunk ^ (self.lane & 7)) << 4),
                             matrix[0], matrix[1], matrix[2], matrix[3]);
    }
  }
};

/// One element's way back through SwiGLU; each product and sum rounds on its own.
struct SwigluGradient {
  float gate;
  float up;
  float h2;
};

template <bool kIsClamped>
__device__ __forceinline__ SwigluGradient swiglu_gradient(float gate, float up, float grad,
                                                          const SwigluArgs& args) {
  constexpr float kLog2E = 1.4426950408889634f;
  const float scale = kIsClamped ? -kLog2E * args.alpha : -kLog2E;
  const float g = kIsClamped ? ptx::min_nan(gate, args.limit) : gate;
  const float s = ptx::reciprocal_approx(1.0f + ptx::exp2_approx(g * scale));
  SwigluGradient out;
  out.h2 = swiglu<kIsClamped>(gate, up, scale, args.limit);
  if constexpr (kIsClamped) {
    const float u = ptx::max_nan(ptx::min_nan(up, args.limit), -args.limit);
    const float slope = __fadd_rn(s, __fmul_rn(__fmul_rn(__fmul_rn(args.alpha, g), s), 1.0f - s));
    const float inner = __fmul_rn(__fmul_rn(grad, u + 1.0f), slope);
    out.gate = gate > args.limit ? 0.0f : inner;
    out.up = up > args.limit || up < -args.limit ? 0.0f : __fmul_rn(__fmul_rn(grad, g), s);
  } else {
    const float slope = __fadd_rn(1.0f, __fmul_rn(g, 1.0f - s));
    out.gate = __fmul_rn(__fmul_rn(__fmul_rn(grad, up), s), slope);
    out.up = __fmul_rn(__fmul_rn(grad, g), s);
  }
  return out;
}

/// grad_h2 of eight columns of a row leaves as grad_h1, and h2, which W2's WGRAD needs, beside it.
template <bool kIsClamped>
class SwigluGradientStore {
 public:
  using Staged = StagedColumns<RowEpilogue::kColumns>;
  static constexpr int kSteps = Staged::kSteps;

  __device__ __forceinline__ SwigluGradientStore(const GroupedGemmArgs& args,
                                                 const std::uint64_t* result_row, int column,
                                                 int /*row_begin*/, int thread)
      : args_(args), staged_(column, thread), result_row_(result_row + staged_.token) {
    is_stored_ = staged_.column < args.m;
    h1_ = *args.h1;
    grad_h1_ = args.frame->scratch.h1;
    h2_begin_ = base_of(args.result);
  }

  template <int kStream>
  __device__ __forceinline__ void load(std::uint32_t staging, int first_token) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      grad_[step] = staged_.read(staging, step);
      const std::uint64_t h2_row = result_row_[first_token + step * Staged::kTokenStep];
      h2_[step] = is_stored_ && h2_row != 0 ? h2_row + staged_.column * 2 : 0;
      // NOTE: cleared, like the accumulators: left undefined they would stay alive and spill.
      gate_[step] = up_[step] = uint4{0, 0, 0, 0};
      if (h2_[step] == 0) continue;
      const std::uint64_t gate = h1_ + h1_offset(step);
      gate_[step] = *reinterpret_cast<const uint4*>(gate);
      up_[step] = *reinterpret_cast<const uint4*>(gate + args_.m * 2);
    }
  }

  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (h2_[step] == 0) continue;
      uint4 grad_gate;
      uint4 grad_up;
      uint4 h2;
      take_back(gate_[step].x, up_[step].x, grad_[step].x, grad_gate.x, grad_up.x, h2.x);
      take_back(gate_[step].y, up_[step].y, grad_[step].y, grad_gate.y, grad_up.y, h2.y);
      take_back(gate_[step].z, up_[step].z, grad_[step].z, grad_gate.z, grad_up.z, h2.z);
      take_back(gate_[step].w, up_[step].w, grad_[step].w, grad_gate.w, grad_up.w, h2.w);
      const std::uint64_t out = grad_h1_ + h1_offset(step);
      *reinterpret_cast<uint4*>(out) = grad_gate;
      *reinterpret_cast<uint4*>(out + args_.m * 2) = grad_up;
      *reinterpret_cast<uint4*>(h2_[step]) = h2;
    }
  }

 private:
  /// Rows of h1 are twice as wide as those of h2.
  __device__ __forceinline__ std::int64_t h1_offset(int step) const {
    return 2 * static_cast<std::int64_t>(h2_[step] - h2_begin_) - staged_.column * 2;
  }
  __device__ __forceinline__ void take_back(std::uint32_t gate, std::uint32_t up,
                                            std::uint32_t grad, std::uint32_t& grad_gate,
                                            std::uint32_t& grad_up, std::uint32_t& h2) const {
    const SwigluGradient low =
        swiglu_gradient<kIsClamped>(low_bf16(gate), low_bf16(up), low_bf16(grad), args_.swiglu);
    const SwigluGradient high =
        swiglu_gradient<kIsClamped>(high_bf16(gate), high_bf16(up), high_bf16(grad), args_.swiglu);
    grad_gate = pack_bf16(low.gate, high.gate);
    grad_up = pack_bf16(low.up, high.up);
    h2 = pack_bf16(low.h2, high.h2);
  }

  const GroupedGemmArgs& args_;
  Staged staged_;
  const std::uint64_t* result_row_;
  std::uint64_t h1_;
  std::uint64_t grad_h1_;
  std::uint64_t h2_begin_;
  bool is_stored_;
  std::uint64_t h2_[kSteps];  ///< where it goes; 0: nowhere
  uint4 grad_[kSteps];
  uint4 gate_[kSteps];
  uint4 up_[kSteps];
};

/// What W2's DGRAD does with accumulators: grad_h2 is rounded as a row of RowEpilogue is.
template <bool kIsClamped>
struct SwigluGradientEpilogue : RowEpilogue {
  using Store = SwigluGradientStore<kIsClamped>;
};

}  // namespace distmoe::cuda
