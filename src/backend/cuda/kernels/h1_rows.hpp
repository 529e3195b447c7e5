// SPDX-License-Identifier: Apache-2.0
//
// What is made of rows of h1 outside of the products: h2 of a saved layer, and clip statistics.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/call_frame.hpp"
#include "backend/cuda/kernels/call_state.hpp"
#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.hpp"
#include "backend/cuda/training_frame.hpp"

namespace distmoe::cuda {

struct RestoreH2Args {
  const CallFrame* frame = nullptr;
  const TrainingFrame* training = nullptr;
  SwigluArgs swiglu{};
  std::int32_t width = 0;  ///< F
};

struct ClipArgs {
  CallState* state = nullptr;
  CallFrame* frame = nullptr;
  const TrainingFrame* training = nullptr;  ///< of a saving call, else null
  float limit = 0.0f;
  std::int32_t width = 0;  ///< F, a multiple of 8
  void* counts = nullptr;  ///< [3] int64, or FP32
  std::int32_t counts_are_float = 0;
};

/// Loads the kernels on the current device; once, outside of captures, before any call.
cudaError_t prepare_h1_rows();

/// Scratch's h2 = SwiGLU(h1) of a layer whose h1 was kept, with the bits of the forward; of another
/// nothing.
cudaError_t launch_restore_h2(const RestoreH2Args& args, int num_blocks, cudaStream_t stream);

/// Before W13: frame->h1 becomes the place of h1, and nothing is counted yet.
cudaError_t launch_begin_clip(const ClipArgs& args, cudaStream_t stream);
/// After W13: counts gate > limit and |up| > limit over the rows of this rank; NaN exceeds nothing.
cudaError_t launch_count_clipped(const ClipArgs& args, int num_blocks, cudaStream_t stream);
/// At the end of a call that did not fail: counts = {gates, ups, R * F}.
cudaError_t launch_write_clip(const ClipArgs& args, cudaStream_t stream);

}  // namespace distmoe::cuda
