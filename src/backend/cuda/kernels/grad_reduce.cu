// SPDX-License-Identifier: Apache-2.0
//
// A block a token: threads own eight columns of grad_x at a time, then warps take the routes'
// scores.
#include "backend/cuda/kernels/first_fault.cuh"
#include "backend/cuda/kernels/grad_reduce.hpp"
#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/kernels/row_dot.cuh"
#include "backend/cuda/kernels/weighted_row.cuh"

namespace distmoe::cuda {
namespace {

constexpr int kColumns = 8;
constexpr int kThreads = 256;
constexpr std::uint32_t kTwoNaNs = 0x7FFF7FFFu;

__device__ void write_grad_x(const GradReduceArgs& args, std::int64_t token, bool failed,
                             const std::int32_t* ids) {
  auto* out = reinterpret_cast<uint4*>(args.grad_x + token * args.grad_x_stride_bytes);
  const int num_vectors = args.hidden_dim / kColumns;
  const auto* rows =
      reinterpret_cast<const uint4*>(args.route_grads) + token * args.top_k * num_vectors;
  for (int vector = static_cast<int>(threadIdx.x); vector < num_vectors; vector += kThreads) {
    if (failed) {
      out[vector] = {kTwoNaNs, kTwoNaNs, kTwoNaNs, kTwoNaNs};
      continue;
    }
    float sums[kColumns] = {};
#pragma unroll 4
    for (int k = 0; k < args.top_k; ++k) {
      if (ids[k] < 0) continue;
      add_scaled(unpack(__ldcs(&rows[static_cast<std::int64_t>(k) * num_vectors + vector])), 1.0f,
                 sums);
    }
    out[vector] = vector_of(round_columns(sums));
  }
}

__device__ float score_gradient(const GradReduceArgs& args, std::int64_t token, int k, int lane) {
  const std::int64_t route = token * args.top_k + k;
  const std::uint64_t kept_h3 = args.training->kept_h3;
  if (kept_h3 == 0 || args.is_normed != 0) return args.score_grads[route];
  const int num_vectors = args.hidden_dim / kColumns;
  const auto* h3 = reinterpret_cast<const uint4*>(kept_h3) + route * num_vectors;
  const auto* dy = reinterpret_cast<const uint4*>(args.dy + token * args.dy_stride_bytes);
  float sum = 0.0f;
  for (int vector = lane; vector < num_vectors; vector += 32) {
    sum = add_products(sum, __ldcs(&h3[vector]), dy[vector]);
  }
  return sum_of_lanes(sum);
}

__device__ void write_grad_scores(const GradReduceArgs& args, std::int64_t token, bool failed,
                                  const std::int32_t* ids) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int k = static_cast<int>(threadIdx.x / 32); k < args.top_k; k += kThreads / 32) {
    float value = __int_as_float(0x7FFFFFFF);
    if (!failed) value = ids[k] < 0 ? 0.0f : score_gradient(args, token, k, lane);
    if (lane != 0) continue;
    const std::int64_t route = token * args.top_k + k;
    if (args.grad_scores_are_bf16 != 0) {
      static_cast<__nv_bfloat16*>(args.grad_scores)[route] = __float2bfloat16_rn(value);
    } else {
      static_cast<float*>(args.grad_scores)[route] = value;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    reduce_gradients(const __grid_constant__ GradReduceArgs args) {
  const std::int64_t token = blockIdx.x;
  const bool failed = args.frame->failed != 0;
  const std::int32_t* ids = args.ids + token * args.top_k;
  if (args.grad_x != 0) write_grad_x(args, token, failed, ids);
  if (args.grad_scores != nullptr) write_grad_scores(args, token, failed, ids);
}

__global__ void keep_backward_fault(CallState* state, const CallFrame* frame) {
  keep_first_fault(*state, *frame);
}

}  // namespace

cudaError_t prepare_grad_reduce() { return load_kernels(reduce_gradients, keep_backward_fault); }

cudaError_t launch_grad_reduce(const GradReduceArgs& args, cudaStream_t stream) {
  if (args.num_tokens > 0) {
    reduce_gradients<<<static_cast<unsigned>(args.num_tokens), kThreads, 0, stream>>>(args);
  }
  return launch_single(keep_backward_fault, stream, args.state, args.frame);
}

}  // namespace distmoe::cuda
