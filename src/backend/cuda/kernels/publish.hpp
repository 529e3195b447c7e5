// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/kernels/call_state.hpp"

namespace distmoe::cuda {

struct PublishArgs {
  CallHead head{};
  CallState* state = nullptr;
  CallFrame* frame = nullptr;
  std::uint64_t ids_window = 0;
  std::uint64_t x_window = 0;  ///< 0: nobody else reads x, it is not copied
  std::uint64_t x = 0;         ///< BF16 [T, D], rows x_stride_bytes apart, multiples of 16 bytes
  std::int64_t x_stride_bytes = 0;
  const void* ids = nullptr;  ///< [T, K]
  std::int64_t id_token_stride = 0;
  std::int64_t id_k_stride = 0;
  const void* scores = nullptr;  ///< [T, K]
  std::int64_t score_token_stride = 0;
  std::int64_t score_k_stride = 0;
  std::uint64_t scores_window = 0;  ///< FP32 [T, K]; 0: nobody else reads scores
  std::int32_t scores_are_bf16 = 0;
  std::int32_t ids_are_64_bit = 0;
  std::int32_t num_tokens = 0;
  std::int32_t top_k = 0;
  std::int32_t num_experts = 0;
  std::int32_t row_bytes = 0;  ///< 2 * D, a multiple of 16
};

/// Loads the kernels on the current device; once, outside of captures, before any call.
cudaError_t prepare_publish();

/// Begins a call: resets the frame and the published header, then narrows the ids to int32, notes
/// the first illegal one, and copies x and, widened to FP32, the scores. A rank that has lost a
/// peer leaves its windows as they are: another one may still read them.
cudaError_t launch_publish(const PublishArgs& args, int num_blocks, cudaStream_t stream);

}  // namespace distmoe::cuda
