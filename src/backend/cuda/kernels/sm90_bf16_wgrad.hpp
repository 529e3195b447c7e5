// SPDX-License-Identifier: Apache-2.0
//
// Host side of the weights' gradients on Hopper, see sm90_bf16_wgrad.cuh for the kernel's contract.
//   out[e, m, n] (+)= sum over the rows r of expert e of grads[r, m] * activations[r, n]
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/call_frame.hpp"
#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.hpp"

namespace distmoe::cuda {

/// Where the gradient of one weight goes: [L, m, n] without gaps, rows at multiples of 16 bytes.
struct WeightGradient {
  void* data = nullptr;
  std::int32_t is_float = 0;     ///< else BF16
  std::int32_t accumulates = 0;  ///< added to what is there, in FP32, rounded once
  /// Rows of a half where the weight interleaves its halves: row h of half i is row 2h + i. 0: rows
  /// are in order.
  std::int32_t interleaved_rows = 0;
};

/// Rows of a gradient that follow each other: all m, or of one half.
DISTMOE_HOST_DEVICE constexpr std::int64_t rows_of_half(const WeightGradient& out, std::int64_t m) {
  return out.interleaved_rows > 0 ? out.interleaved_rows : m;
}

struct WgradArgs {
  const CallFrame* frame = nullptr;
  const std::int32_t* expert_begin = nullptr;  ///< [L + 1]
  /// On the device: where the operands' rows are, at multiples of 128 bytes from `buffer`.
  const std::uint64_t* grads = nullptr;
  const std::uint64_t* activations = nullptr;
  std::uint64_t buffer = 0;  ///< the activation buffer
  WeightGradient out{};
  std::int32_t num_experts = 0;  ///< L
  std::int32_t m = 0;
  std::int32_t n = 0;  ///< a multiple of 8
};

struct WgradMaps {
  CUtensorMap grads;
  CUtensorMap activations;
  CUtensorMap out;          ///< of the first half where the gradient is interleaved
  CUtensorMap second_half;  ///< unused where it is not
};

/// Where rows of operands may be.
struct ActivationBuffer {
  const void* data;
  std::int64_t bytes;
  std::int64_t num_rows;  ///< that an operand has at most
};

/// The maps of a gradient and its operands. Operands are rows of m and n elements anywhere in an
/// activation buffer: coordinates are element of 64, row, and 128 bytes from the buffer's start;
/// rows beyond num_rows read as 0. Of the gradient [experts, m, n] they are element, row and
/// expert; what lies beyond a dimension is not written.
bool make_wgrad_maps(EncodeTiled encode, const ActivationBuffer& operands, const WgradArgs& args,
                     WgradMaps* maps);

/// Loads the kernels and raises their shared memory limit; once per device, outside of captures.
cudaError_t prepare_wgrad();

/// Of a failed call a fresh gradient becomes NaN, and an accumulated one stays as it is. An expert
/// without rows: 0, or as it is. `num_blocks` is even, one per SM.
cudaError_t launch_wgrad(const WgradArgs& args, const WgradMaps& maps, int num_blocks,
                         cudaStream_t stream);

}  // namespace distmoe::cuda
