// SPDX-License-Identifier: Apache-2.0
//
// Policies of the grouped GEMM (sm90_bf16_grouped_gemm.cuh) for training.
//
//   product    m   k        weights                       tokens     result
//   W13 saving 2F  D        W13 as in a forward           x          h2, and h1 in place
//   W2 DGRAD   F   D        W2 [L, d, f], f contiguous    grad_h3    grad_h1 and h2
//   W13 DGRAD  D   F twice  W13 [L, half, f, d]           grad_h1    a row a route, to its owner
//
// DGRAD sums over the rows of a weight matrix, whose columns are contiguous: the M side lies
// transposed in shared memory, 64 weight rows x 64 k a box, and wgmma reads it so. W13's sum takes
// the gate's k first, then the up's, so that no layout of W13 changes a bit.
#pragma once

#include "backend/cuda/kernels/sm90_bf16_grad_gemm.hpp"
#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.cuh"
#include "backend/cuda/tile/grad_epilogue.cuh"
#include "backend/cuda/tile/lean_epilogue.cuh"

namespace distmoe::cuda {

template <bool kIsClamped>
struct W13SavingPolicy : W13Policy<kIsClamped> {
  using Epilogue = SavingSwigluEpilogue<kIsClamped>;
};

/// Epilogues read what earlier kernels decided, so that nothing starts before them.
struct TransposedWeights {
  static constexpr bool kTransposesWeights = true;
  static constexpr bool kPulls = false;
  static constexpr bool kLoadsWeightsEarly = false;
  static constexpr int kColumnsPerWeightRow = 1;
};

template <bool kIsClamped>
struct W2DgradPolicy : TransposedWeights {
  using Epilogue = SwigluGradientEpilogue<kIsClamped>;
  static constexpr Product kProduct = Product::kW2Dgrad;
  static constexpr int kSegments = 1;

  static __device__ TensorCoordinates<3> weight_coordinates(int expert, int row,
                                                            const WeightStep& step) {
    return {{row, step.k, expert}};
  }
};

template <bool kIsClamped>
struct W2LeanDgradPolicy : W2DgradPolicy<kIsClamped> {
  using Epilogue = LeanGradientEpilogue<kIsClamped>;
};

struct W13DgradPolicy : TransposedWeights {
  using Epilogue = RowEpilogue;
  static constexpr Product kProduct = Product::kW13Dgrad;
  static constexpr int kSegments = 2;

  static __device__ TensorCoordinates<4> weight_coordinates(int expert, int row,
                                                            const WeightStep& step) {
    return {{row, step.k, step.segment, expert}};
  }
};

}  // namespace distmoe::cuda
