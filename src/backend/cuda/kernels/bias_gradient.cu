// SPDX-License-Identifier: Apache-2.0
//
// A thread a column of an expert: a warp reads 64 neighbouring bytes of each row.
#include "backend/cuda/kernels/bias_gradient.hpp"

#include <cuda_bf16.h>

#include "backend/cuda/kernels/load_kernels.hpp"

namespace distmoe::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    sum_bias_gradient(const __grid_constant__ BiasGradientArgs args) {
  const int column = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  const int expert = static_cast<int>(blockIdx.y);
  if (column >= args.width) return;
  const bool is_failed = args.frame->failed != 0;
  const int begin = is_failed ? 0 : args.expert_begin[expert];
  const int end = is_failed ? 0 : args.expert_begin[expert + 1];
  const bool accumulates = args.out.accumulates != 0;
  if (begin == end && accumulates) return;
  const auto* grads = reinterpret_cast<const __nv_bfloat16*>(*args.grads) + column;
  float sum = is_failed ? __int_as_float(0x7FFFFFFF) : 0.0f;
#pragma unroll 8
  for (int row = begin; row < end; ++row) {
    sum = __fadd_rn(sum, __bfloat162float(grads[std::int64_t{row} * args.width]));
  }
  const int half = args.out.interleaved_rows;
  const int position = half == 0 ? column : column < half ? 2 * column : 2 * (column - half) + 1;
  const std::int64_t at = std::int64_t{expert} * args.width + position;
  if (args.out.is_float != 0) {
    float& out = static_cast<float*>(args.out.data)[at];
    out = accumulates ? __fadd_rn(out, sum) : sum;
  } else {
    __nv_bfloat16& out = static_cast<__nv_bfloat16*>(args.out.data)[at];
    out = __float2bfloat16_rn(accumulates ? __fadd_rn(__bfloat162float(out), sum) : sum);
  }
}

}  // namespace

cudaError_t prepare_bias_gradient() { return load_kernels(sum_bias_gradient); }

cudaError_t launch_bias_gradient(const BiasGradientArgs& args, cudaStream_t stream) {
  if (args.num_experts == 0) return cudaSuccess;
  const dim3 blocks(static_cast<unsigned>((args.width + kThreads - 1) / kThreads),
                    static_cast<unsigned>(args.num_experts));
  sum_bias_gradient<<<blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace distmoe::cuda
