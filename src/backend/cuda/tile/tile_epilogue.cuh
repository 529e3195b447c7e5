// SPDX-License-Identifier: Apache-2.0
//
// From accumulators to rows in memory. The M side of a tile is the output's columns, so that every
// pass transposes: registers -> stmatrix.trans -> staging [token][column] -> 16-byte stores of
// whole rows. Staging is double-buffered: one barrier of the warpgroup per pass.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.hpp"
#include "backend/cuda/ptx/approximate.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/shared_copy.cuh"
#include "backend/cuda/tile/gemm_storage.hpp"
#include "backend/cuda/tile/named_barrier.cuh"

namespace distmoe::cuda {

/// The two m64 accumulators of a consumer thread; layout at ptx::Wgmma.
template <int kN>
using Accumulators = float[2][kN / 2];

/// bias[i][h] of accumulator i, row half h (rows 8h apart), 0 where there is none.
struct TileBias {
  float value[2][2];
};

__device__ __forceinline__ float bias_at(const DeviceBias& bias, std::int64_t expert,
                                         std::int64_t index, int width) {
  if (bias.data == nullptr || index >= width) return 0.0f;
  const std::int64_t offset = expert * bias.expert_stride + index * bias.stride;
  return bias.is_bf16 != 0 ? __bfloat162float(static_cast<const __nv_bfloat16*>(bias.data)[offset])
                           : static_cast<const float*>(bias.data)[offset];
}

__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(packed);
}
__device__ __forceinline__ float low_bf16(std::uint32_t packed) {
  return __uint_as_float(packed << 16);
}
__device__ __forceinline__ float high_bf16(std::uint32_t packed) {
  return __uint_as_float(packed & 0xFFFF0000u);
}

/// SwiGLU of one element, from gate and up as they are after rounding. NaN goes through the clamps.
/// s(z) = 1 / (1 + 2^(-z log2 e)); `scale` is -log2 e (times alpha).
template <bool kIsClamped>
__device__ __forceinline__ float swiglu(float gate, float up, float scale, float limit) {
  const float g = kIsClamped ? ptx::min_nan(gate, limit) : gate;
  const float s = ptx::reciprocal_approx(1.0f + ptx::exp2_approx(g * scale));
  if (!kIsClamped) return g * s * up;
  return g * s * (ptx::max_nan(ptx::min_nan(up, limit), -limit) + 1.0f);
}

template <typename Epilogue>
class RowStore;

/// What W13 does with accumulators: rows r and r + 8 of a fragment are gate and up of one column of
/// h2.
template <bool kIsClamped>
struct SwigluEpilogue {
  using Store = RowStore<SwigluEpilogue>;
  static constexpr int kStreams = 1;                              ///< passes over the same tokens
  static constexpr int kColumns = kWeightRowsPerWarpgroup / 2;    ///< of a warpgroup
  static constexpr int kTokens = kStagingBytes / (kColumns * 2);  ///< of a pass
  static constexpr int kBlocks = kTokens / 8;                     ///< of eight tokens

  static __device__ int width(const GroupedGemmArgs& args) { return args.m / 2; }

  static __device__ TileBias load_bias(const GroupedGemmArgs& args, int expert, int column,
                                       const ConsumerThread& self) {
    TileBias bias;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int f = column + 32 * i + 8 * self.warp + self.lane / 4;
      bias.value[i][0] = bias_at(args.bias, expert, f, args.m / 2);
      bias.value[i][1] = bias_at(args.bias_up, expert, f, args.m / 2);
    }
    return bias;
  }

  /// Stages tokens kTokens * kPass and on. Lane l addresses token l of the pass.
  template <int kN, int kPass>
  static __device__ __forceinline__ void stage(const GroupedGemmArgs& args,
                                               const Accumulators<kN>& acc, const TileBias& bias,
                                               std::uint32_t staging, const ConsumerThread& self) {
    constexpr float kLog2E = 1.4426950408889634f;
    const float scale = kIsClamped ? -kLog2E * args.swiglu.alpha : -kLog2E;
    const float limit = args.swiglu.limit;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint32_t matrix[kBlocks];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        constexpr int kLast = kN / 8;
        const int block = kPass * kBlocks + b;
        matrix[b] = 0;
        if (block >= kLast) continue;
        const float* d = &acc[i][4 * block];
        const std::uint32_t gate = pack_bf16(d[0] + bias.value[i][0], d[1] + bias.value[i][0]);
        const std::uint32_t up = pack_bf16(d[2] + bias.value[i][1], d[3] + bias.value[i][1]);
        matrix[b] = pack_bf16(swiglu<kIsClamped>(low_bf16(gate), low_bf16(up), scale, limit),
                              swiglu<kIsClamped>(high_bf16(gate), high_bf16(up), scale, limit));
      }
      const int chunk = 4 * i + self.warp;
      ptx::stmatrix_x4_trans(staging + self.lane * kColumns * 2 + ((chunk ^ (self.lane & 7)) << 4),
                             matrix[0], matrix[1], matrix[2], matrix[3]);
    }
  }
};

/// What W2 does with accumulators: bias and one rounding.
struct RowEpilogue {
  using Store = RowStore<RowEpilogue>;
  static constexpr int kStreams = 1;
  static constexpr int kColumns = kWeightRowsPerWarpgroup;
  static constexpr int kTokens = kStagingBytes / (kColumns * 2);
  static constexpr int kBlocks = kTokens / 8;

  static __device__ int width(const GroupedGemmArgs& args) { return args.m; }

  static __device__ TileBias load_bias(const GroupedGemmArgs& args, int expert, int column,
                                       const ConsumerThread& self) {
    TileBias bias;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int d = column + 64 * i + 16 * self.warp + 8 * h + self.lane / 4;
        bias.value[i][h] = bias_at(args.bias, expert, d, args.m);
      }
    }
    return bias;
  }

  /// Lane l addresses token 8 (l / 16) + l % 8 of the pass, row half (l / 8) % 2.
  template <int kN, int kPass>
  static __device__ __forceinline__ void stage(const GroupedGemmArgs&, const Accumulators<kN>& acc,
                                               const TileBias& bias, std::uint32_t staging,
                                               const ConsumerThread& self) {
    const int token = self.lane / 16 * 8 + self.lane % 8;
    const int half = self.lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint32_t matrix[kBlocks][2];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        constexpr int kLast = kN / 8;
        const int block = kPass * kBlocks + b;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          matrix[b][h] = 0;
          if (block >= kLast) continue;
          const float* d = &acc[i][4 * block + 2 * h];
          matrix[b][h] = pack_bf16(d[0] + bias.value[i][h], d[1] + bias.value[i][h]);
        }
      }
      const int chunk = 8 * i + 2 * self.warp + half;
      ptx::stmatrix_x4_trans(staging + token * kColumns * 2 + ((chunk ^ (token & 7)) << 4),
                             matrix[0][0], matrix[0][1], matrix[1][0], matrix[1][1]);
    }
  }
};

/// What of every staged pass [token][column] a thread takes: eight columns of kSteps rows.
template <int kColumns>
struct StagedColumns {
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kSteps = kStagingBytes / 16 / kWarpgroupThreads;
  static constexpr int kTokenStep = kWarpgroupThreads / kChunks;
  static_assert(kTokenStep % 8 == 0, "rows of a thread lie in one swizzle phase");

  /// `first_column` is the warpgroup's.
  __device__ __forceinline__ StagedColumns(int first_column, int thread)
      : token(thread / kChunks), column(first_column + thread % kChunks * 8) {
    offset_ = token * kColumns * 2 + ((thread % kChunks ^ (token & 7)) << 4);
  }

  /// Of row token + step * kTokenStep of the pass.
  __device__ __forceinline__ uint4 read(std::uint32_t staging, int step) const {
    return ptx::load_shared_16(staging + offset_ + step * kTokenStep * kColumns * 2);
  }

  int token;   ///< the thread's first row of a pass
  int column;  ///< the first of eight

 private:
  std::uint32_t offset_;
};

/// What a thread stores of every pass: 16 bytes of kSteps rows. Addresses and data are read apart
/// from the stores, so that their latencies overlap with the staging of the next pass.
template <typename Epilogue>
class RowStore {
 public:
  using Staged = StagedColumns<Epilogue::kColumns>;
  static constexpr int kSteps = Staged::kSteps;
  static constexpr int kTokenStep = Staged::kTokenStep;

  /// `column` is the warpgroup's first, `end_column` the first that is not stored.
  __device__ __forceinline__ RowStore(const std::uint64_t* result_row, int column, int end_column,
                                      int thread)
      : staged_(column, thread), result_row_(result_row + staged_.token) {
    column_bytes_ = staged_.column * 2;
    is_stored_ = staged_.column < end_column;
  }
  __device__ __forceinline__ RowStore(const GroupedGemmArgs& args, const std::uint64_t* result_row,
                                      int column, int /*row_begin*/, int thread)
      : RowStore(result_row, column, Epilogue::width(args), thread) {}

  template <int kStream = 0>
  __device__ __forceinline__ void load(std::uint32_t staging, int first_token) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      data_[step] = staged_.read(staging, step);
      row_[step] = result_row_[first_token + step * kTokenStep];
    }
  }

  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (is_stored_ && row_[step] != 0) {
        *reinterpret_cast<uint4*>(row_[step] + column_bytes_) = data_[step];
      }
    }
  }

 protected:
  Staged staged_;
  const std::uint64_t* result_row_;
  int column_bytes_;
  bool is_stored_;
  uint4 data_[kSteps];
  std::uint64_t row_[kSteps];  ///< 0: not stored
};

/// All passes of a tile from kPass on, whose own is staged.
template <typename Epilogue, int kN, int kPass>
__device__ __forceinline__ void store_staged(const GroupedGemmArgs& args, GemmStorage& shared,
                                             const Accumulators<kN>& acc, const TileBias& bias,
                                             typename Epilogue::Store& rows,
                                             const ConsumerThread& self) {
  constexpr bool kHasNext = (kPass / Epilogue::kStreams + 1) * Epilogue::kTokens < kN ||
                            kPass % Epilogue::kStreams + 1 < Epilogue::kStreams;
  sync_warpgroup(self.warpgroup);
  rows.template load<kPass % Epilogue::kStreams>(
      ptx::shared_address(shared.staging[self.warpgroup][kPass % 2]),
      kPass / Epilogue::kStreams * Epilogue::kTokens);
  if constexpr (kHasNext) {
    Epilogue::template stage<kN, kPass + 1>(
        args, acc, bias, ptx::shared_address(shared.staging[self.warpgroup][(kPass + 1) % 2]),
        self);
  }
  rows.store();
  if constexpr (kHasNext) {
    store_staged<Epilogue, kN, kPass + 1>(args, shared, acc, bias, rows, self);
  }
}

template <typename Epilogue, int kN>
__device__ __forceinline__ void store_tile(const GroupedGemmArgs& args, GemmStorage& shared,
                                           const Accumulators<kN>& acc, const TileBias& bias,
                                           int column, int row_begin, const ConsumerThread& self) {
  static_assert((kN + Epilogue::kTokens - 1) / Epilogue::kTokens * Epilogue::kTokens <= kResultRows,
                "passes stay inside of the table of result rows");
  typename Epilogue::Store rows(args, shared.result_row[self.warpgroup], column, row_begin,
                                self.thread);
  Epilogue::template stage<kN, 0>(args, acc, bias,
                                  ptx::shared_address(shared.staging[self.warpgroup][0]), self);
  store_staged<Epilogue, kN, 0>(args, shared, acc, bias, rows, self);
}

}  // namespace distmoe::cuda
