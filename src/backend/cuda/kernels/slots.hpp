// SPDX-License-Identifier: Apache-2.0
//
// The activation slots of a context on the device: plan/slot_planner.hpp in kernels of one thread,
// so that a call is decided without the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/kernels/call_state.hpp"
#include "backend/cuda/training_frame.hpp"
#include "plan/slot_planner.hpp"

namespace distmoe::cuda {

/// One saved layer, where it lives until its backward, and what its call needs to be decided.
struct SlotArgs {
  CallHead head{};  ///< of a backward
  CallState* state = nullptr;
  CallFrame* frame = nullptr;
  TrainingFrame* training = nullptr;
  const PeerWindows* windows = nullptr;  ///< [P]
  SlotLimits limits{};
  SlotRef slot{};
  SavedLayer* layer = nullptr;
  std::int64_t* saved_before_P = nullptr;
  std::int64_t* tokens_P = nullptr;        ///< of the forward, of every rank
  const std::int64_t* rows_P = nullptr;    ///< of the forward, of every rank
  const std::int32_t* num_rows = nullptr;  ///< of the forward, of this rank
  std::int64_t slot_index = 0;
  std::int64_t slot_layers = 0;   ///< depth that was selected
  std::uint64_t activations = 0;  ///< the activation buffer
  ScratchLimits scratch{};
  std::uint64_t ids_window = 0;
  std::int64_t num_tokens = 0;
};

/// Loads the kernels on the current device; once, outside of captures, before any call.
cudaError_t prepare_slots();

/// Takes the bytes of a saving forward that was routed, decides whether it saves or recomputes and
/// says in the training frame where its activations go. A failed call takes nothing.
cudaError_t launch_push_layer(const SlotArgs& args, cudaStream_t stream);

/// Begins a backward as launch_publish() does a forward: the frame, the published header and where
/// the forward's activations are. The backward of a failed forward fails too, without a fault of
/// its own. Of a refused one no more than head, state, frame, training and ids_window is read.
cudaError_t launch_begin_backward(const SlotArgs& args, cudaStream_t stream);

/// Gives the layer's bytes back.
cudaError_t launch_pop_layer(const SlotArgs& args, cudaStream_t stream);

}  // namespace distmoe::cuda
