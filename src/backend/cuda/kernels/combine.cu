// SPDX-License-Identifier: Apache-2.0
//
// One block a token; a thread owns 8 columns at a time. The product and the sum each round once, as
// the CPU's do.
#include <cuda_bf16.h>

#include "backend/cuda/kernels/combine.hpp"
#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {
namespace {

constexpr int kColumns = 8;
constexpr std::uint32_t kTwoNaNs = 0x7FFF7FFFu;

__device__ float load_score(const CombineArgs& args, std::int64_t token, int k) {
  const std::int64_t offset = token * args.score_token_stride + k * args.score_k_stride;
  return args.scores_are_bf16
             ? __bfloat162float(static_cast<const __nv_bfloat16*>(args.scores)[offset])
             : static_cast<const float*>(args.scores)[offset];
}

__device__ void add_scaled(const uint4& packed, float score, float (&sums)[kColumns]) {
  const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const float low = __uint_as_float(words[i] << 16);
    const float high = __uint_as_float(words[i] & 0xFFFF0000u);
    sums[2 * i] = __fadd_rn(sums[2 * i], __fmul_rn(low, score));
    sums[2 * i + 1] = __fadd_rn(sums[2 * i + 1], __fmul_rn(high, score));
  }
}

__device__ uint4 pack(const float (&sums)[kColumns]) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(sums[2 * i], sums[2 * i + 1]);
    words[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
  }
  return {words[0], words[1], words[2], words[3]};
}

__global__ void combine(const __grid_constant__ CombineArgs args) {
  extern __shared__ float scores[];  // [K], then the ids [K]
  auto* ids = reinterpret_cast<std::int32_t*>(scores + args.top_k);
  const std::int64_t token = blockIdx.x;
  for (int k = static_cast<int>(threadIdx.x); k < args.top_k; k += kCombineThreads) {
    ids[k] = args.ids[token * args.top_k + k];
    scores[k] = load_score(args, token, k);
  }
  __syncthreads();
  const bool failed = args.frame->failed != 0;
  auto* y = reinterpret_cast<uint4*>(args.y + token * args.y_stride_bytes);
  const int num_vectors = args.hidden_dim / kColumns;
  const auto* rows =
      reinterpret_cast<const uint4*>(args.results) + token * args.top_k * num_vectors;
  for (int vector = static_cast<int>(threadIdx.x); vector < num_vectors;
       vector += kCombineThreads) {
    if (failed) {
      y[vector] = {kTwoNaNs, kTwoNaNs, kTwoNaNs, kTwoNaNs};
      continue;
    }
    float sums[kColumns] = {};
#pragma unroll 4
    for (int k = 0; k < args.top_k; ++k) {
      if (ids[k] < 0) continue;
      add_scaled(__ldcs(&rows[static_cast<std::int64_t>(k) * num_vectors + vector]), scores[k],
                 sums);
    }
    y[vector] = pack(sums);
  }
}

/// Keeps the fault of a failed call where no earlier one is kept.
__global__ void keep_fault(CallState* state, const CallFrame* frame) {
  if (frame->failed == 0 || state->first_fault.kind != FaultKind::kNone) return;
  state->first_fault = frame->fault;
  state->first_fault_call = static_cast<std::int64_t>(state->num_calls);
}

}  // namespace

cudaError_t prepare_combine() { return load_kernels(combine, keep_fault); }

cudaError_t launch_combine(const CombineArgs& args, cudaStream_t stream) {
  if (args.num_tokens > 0) {
    const LaunchShape shape = combine_launch(args.num_tokens, args.top_k);
    combine<<<shape.blocks, shape.threads, shape.shared_bytes, stream>>>(args);
  }
  constexpr LaunchShape kSingle = kSingleThreadLaunch;
  keep_fault<<<kSingle.blocks, kSingle.threads, kSingle.shared_bytes, stream>>>(args.state,
                                                                                args.frame);
  return cudaGetLastError();
}

}  // namespace distmoe::cuda
