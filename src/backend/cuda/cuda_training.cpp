// SPDX-License-Identifier: Apache-2.0
//
// What a saving forward does beside a forward: its slot, and what it keeps there.
#include <algorithm>

#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device.hpp"
#include "backend/cuda/kernels/bias_gradient.hpp"
#include "backend/cuda/kernels/grad_dispatch.hpp"
#include "backend/cuda/kernels/grad_reduce.hpp"
#include "backend/cuda/kernels/sm90_bf16_grad_gemm.hpp"
#include "layout/context_buffers.hpp"
#include "layout/cuda_layout.hpp"

namespace distmoe::cuda {

static_assert(kStageK == cuda_layout::kGradientStageRows);
static_assert(sizeof(TrainingFrame) == cuda_layout::kTrainingFrameBytes);
static_assert(sizeof(SlotState) == kSlotStateBytes);
static_assert(sizeof(SavedLayer) == kSavedLayerBytes);

void CudaBackend::prepare_training() {
  DISTMOE_CUDA_CHECK(prepare_slots());
  DISTMOE_CUDA_CHECK(prepare_training_rows());
  DISTMOE_CUDA_CHECK(prepare_grad_gemm());
  DISTMOE_CUDA_CHECK(prepare_grad_dispatch());
  DISTMOE_CUDA_CHECK(prepare_wgrad());
  DISTMOE_CUDA_CHECK(prepare_bias_gradient());
  DISTMOE_CUDA_CHECK(prepare_grad_reduce());
}

std::uint64_t CudaBackend::activations_at(std::int64_t offset) const {
  return reinterpret_cast<std::uint64_t>(memory_.activations()) +
         static_cast<std::uint64_t>(offset);
}

TrainingFrame* CudaBackend::training_frame() const {
  return memory_.buffer_of<TrainingFrame>(buffer_name::kTrainingFrame);
}

void CudaBackend::take_metadata(const std::optional<SlotTicket>& ticket) {
  ticket_ = ticket;
  if (!ticket) {
    metadata_ = forward_only_metadata(memory_);
    return;
  }
  const std::int64_t layers = setup_.config.max_moe_layers_per_activation_slot;
  metadata_ = saved_metadata(memory_, ticket->slot * layers + ticket->layer,
                             setup_.plan.num_slots * layers);
}

SlotArgs CudaBackend::slot_args(const SlotTicket& ticket) const {
  const Config& config = setup_.config;
  const std::int64_t layer = ticket.slot * config.max_moe_layers_per_activation_slot + ticket.layer;
  return {.state = memory_.buffer_of<CallState>(buffer_name::kCallState),
          .frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
          .training = training_frame(),
          .windows = memory_.buffer_of<PeerWindows>(buffer_name::kPeerWindows),
          .limits = {layer_dims(config), config.max_tokens, setup_.plan.slot_bytes, setup_.size,
                     setup_.rank},
          .slot = {memory_.buffer_of<SlotState>(buffer_name::kSlotStates) + ticket.slot,
                   memory_.buffer_of<std::int64_t>(buffer_name::kSlotBytes) +
                       ticket.slot * setup_.size},
          .layer = memory_.buffer_of<SavedLayer>(buffer_name::kSavedLayers) + layer,
          .saved_before_P =
              memory_.buffer_of<std::int64_t>(buffer_name::kSavedBefore) + layer * setup_.size,
          .tokens_P = metadata_.tokens,
          .rows_P = metadata_.rows_per_rank,
          .num_rows = metadata_.expert_begin + num_local(),
          .slot_index = ticket.slot,
          .slot_layers = ticket.slot_layers,
          .activations = activations_at(0),
          .scratch = scratch_limits(),
          .ids_window = memory_.address(buffer_name::kIdWindow)};
}

/// Blocks of kernels that walk over rows.
int CudaBackend::row_blocks() const {
  constexpr int kRowBlocksPerSm = 8;
  return choice_.persistent_blocks * kRowBlocksPerSm;
}

TokenRows CudaBackend::token_rows() const {
  auto* own = memory_.buffer_of<std::int32_t>(buffer_name::kTokenRows);
  return {.own = own,
          .gathered = own + setup_.config.max_tokens * setup_.config.top_k,
          .bytes = memory_.bytes_of(buffer_name::kTokenRows)};
}

RouteLimits CudaBackend::route_limits() const {
  return {.gather_rows = gather_rows(),
          .max_tokens = static_cast<std::int32_t>(setup_.config.max_tokens),
          .num_ranks = setup_.size,
          .top_k = static_cast<std::int32_t>(setup_.config.top_k)};
}

void CudaBackend::carve(const ForwardCall& call) {
  if (!call.ticket) return;
  const DeviceScope scope(setup_.device);
  const cudaStream_t stream = stream_of(call);
  const TensorView& scores = call.topk_scores_TK;
  DISTMOE_CUDA_CHECK(launch_push_layer(slot_args(*call.ticket), stream));
  DISTMOE_CUDA_CHECK(
      launch_keep_inputs({.frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
                          .ids = published_ids(memory_.address(buffer_name::kIdWindow)),
                          .scores = scores.data,
                          .score_token_stride = scores.strides[0],
                          .score_k_stride = scores.strides[1],
                          .scores_are_bf16 = scores.dtype == DType::kBF16,
                          .kept_ids = metadata_.ids,
                          .kept_scores = metadata_.scores,
                          .num_tokens = static_cast<std::int32_t>(call.num_tokens),
                          .top_k = static_cast<std::int32_t>(setup_.config.top_k)},
                         row_blocks(), stream));
  DISTMOE_CUDA_CHECK(launch_list_rows(
      {.frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
       .training = training_frame(),
       .rows = token_rows(),
       .row_origin = metadata_.row_origin,
       .gather_index = metadata_.gather_index,
       .result_row_address = setup_.size == 1 ? metadata_.result_row_address : nullptr,
       .results = memory_.address(buffer_name::kCombineWindow),
       .row_bytes = setup_.config.hidden_dim * 2,
       .limits = route_limits(),
       .rank = setup_.rank,
       .top_k = static_cast<std::int32_t>(setup_.config.top_k)},
      row_blocks(), stream));
}

void CudaBackend::spread_x(const TensorView& x_TD, bool is_backward, cudaStream_t stream) {
  DISTMOE_CUDA_CHECK(
      launch_spread_x({.frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
                       .training = training_frame(),
                       .rows = token_rows(),
                       .x = address_of(x_TD),
                       .x_stride_bytes = row_stride_bytes(x_TD),
                       .gather_source = metadata_.gather_source,
                       .row_bytes = setup_.config.hidden_dim * 2,
                       .is_backward = is_backward ? 1 : 0,
                       .num_tokens = static_cast<std::int32_t>(x_TD.shape[0]),
                       .top_k = static_cast<std::int32_t>(setup_.config.top_k)},
                      row_blocks(), stream));
}

void CudaBackend::keep_h3(const ForwardCall& call) {
  DISTMOE_CUDA_CHECK(launch_keep_h3({.frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
                                     .training = training_frame(),
                                     .results = memory_.address(buffer_name::kCombineWindow),
                                     .ids = metadata_.ids,
                                     .row_bytes = setup_.config.hidden_dim * 2,
                                     .num_routes = call.num_tokens * setup_.config.top_k},
                                    row_blocks(), stream_of(call)));
}

void CudaBackend::rewind(const SlotTicket& ticket) {
  const DeviceScope scope(setup_.device);
  DISTMOE_CUDA_CHECK(launch_pop_layer(slot_args(ticket), backward_stream_));
  mark_end_of_call(backward_stream_);
}

void CudaBackend::discard(const SlotTicket& ticket, void* stream) {
  backward_stream_ = stream != nullptr ? static_cast<cudaStream_t>(stream) : own_stream_;
  rewind(ticket);
}

void CudaBackend::reset_slots() {
  const DeviceScope scope(setup_.device);
  wait_for_calls();
  const auto clear = [&](void* memory, std::int64_t bytes) {
    if (bytes == 0) return;
    DISTMOE_CUDA_CHECK(cudaMemsetAsync(memory, 0, static_cast<std::size_t>(bytes), own_stream_));
  };
  auto* state = memory_.buffer_of<CallState>(buffer_name::kCallState);
  clear(&state->peak_rows, sizeof(state->peak_rows));
  // An empty slot is all zeros.
  for (const char* name : {buffer_name::kSlotStates, buffer_name::kSlotBytes}) {
    clear(memory_.buffer(name), memory_.bytes_of(name));
  }
  DISTMOE_CUDA_CHECK(cudaStreamSynchronize(own_stream_));
}

RegionPeaks CudaBackend::region_peaks() {
  const DeviceScope scope(setup_.device);
  RegionPeaks peaks;
  const std::int64_t rows = read_state().peak_rows;
  const std::int64_t scratch = scratch_bytes(scratch_limits(), rows);
  peaks.device_scratch_bytes = std::min(scratch, setup_.plan.device_scratch_bytes);
  peaks.host_scratch_bytes = scratch - peaks.device_scratch_bytes;
  std::vector<SlotState> slots(static_cast<std::size_t>(setup_.plan.num_slots));
  if (slots.empty()) return peaks;
  copy_from_device(slots.data(), memory_.buffer(buffer_name::kSlotStates),
                   slots.size() * sizeof(SlotState));
  for (const SlotState& slot : slots) peaks.slot_bytes.push_back(slot.peak_bytes);
  return peaks;
}

}  // namespace distmoe::cuda
