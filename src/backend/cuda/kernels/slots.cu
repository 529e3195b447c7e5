// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/kernels/slots.hpp"

#include "backend/cuda/kernels/begin_call.cuh"
#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/load_kernels.hpp"
#include "plan/scratch_layout.hpp"

namespace distmoe::cuda {
namespace {

/// Where a saved layer keeps what it keeps.
__device__ TrainingFrame kept_layer(const SlotArgs& args) {
  const std::int64_t begin = args.slot_index * args.limits.slot_bytes + args.layer->offset;
  TrainingFrame frame{};
  frame.is_recomputed = args.layer->is_recomputed ? 1 : 0;
  if (args.layer->is_recomputed) {
    frame.kept_x = args.activations + begin;
    return frame;
  }
  const RegionOffsets kept =
      saved_layout(args.limits.shape, args.tokens_P[args.limits.rank], *args.num_rows, begin);
  frame.h1 = args.activations + kept.h1;
  if (args.limits.shape.activation_policy == ActivationPolicy::kLean) {
    frame.kept_x = args.activations + kept.x;
    return frame;
  }
  frame.x = args.activations + kept.x;
  frame.kept_h3 = args.activations + kept.h3;
  return frame;
}

__global__ void push_slot_layer(const __grid_constant__ SlotArgs args) {
  *args.layer = SavedLayer{};
  *args.training = TrainingFrame{};
  args.layer->slot = args.slot_index;
  if (args.frame->failed != 0) return;
  for (int rank = 0; rank < args.limits.ep_size; ++rank) {
    args.tokens_P[rank] = published_header(args.windows[rank].ids)->num_tokens;
  }
  // NOTE: a failed call takes no layer, so that the host's ledger may count more of them.
  push_layer(args.limits, args.slot_layers, {args.tokens_P, args.rows_P}, args.slot,
             args.saved_before_P, *args.layer);
  *args.training = kept_layer(args);
}

__global__ void begin_backward(const __grid_constant__ SlotArgs args) {
  CallFrame frame = next_frame(*args.state, args.head);
  TrainingFrame training{};
  if (frame.failed == 0 && !args.layer->is_live) {
    frame.failed = 1;
  } else if (frame.failed == 0) {
    frame.num_rows = *args.num_rows;
    frame.scratch = place_scratch(args.scratch, frame.num_rows);
    training = kept_layer(args);
    if (training.kept_x != 0) training.x = frame.scratch.x;
    if (args.layer->is_recomputed) training.h1 = frame.scratch.h1;
  }
  *args.frame = frame;
  *args.training = training;
  publish_header(frame, args.ids_window, args.num_tokens);
}

__global__ void pop_slot_layer(const __grid_constant__ SlotArgs args) {
  pop_layer(args.limits, *args.layer, args.saved_before_P, args.slot);
}

}  // namespace

cudaError_t prepare_slots() {
  return load_kernels(push_slot_layer, begin_backward, pop_slot_layer);
}

cudaError_t launch_push_layer(const SlotArgs& args, cudaStream_t stream) {
  return launch_single(push_slot_layer, stream, args);
}

cudaError_t launch_begin_backward(const SlotArgs& args, cudaStream_t stream) {
  return launch_single(begin_backward, stream, args);
}

cudaError_t launch_pop_layer(const SlotArgs& args, cudaStream_t stream) {
  return launch_single(pop_slot_layer, stream, args);
}

}  // namespace distmoe::cuda
