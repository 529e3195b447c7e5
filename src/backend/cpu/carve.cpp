// SPDX-License-Identifier: Apache-2.0
//
// Step 2b: where the rows of a call lie. Its scratch ends where the activation buffer ends; a
// saving call's regions stand in its slot, whole or, where the slot has no room, its input alone.
// Its backward finds them there.
#include <algorithm>

#include "backend/cpu/cpu_backend.hpp"
#include "plan/scratch_layout.hpp"

namespace distmoe::cpu {

void CpuBackend::carve(const ForwardCall& call) {
  place_scratch();
  if (!call.ticket) return;
  place_saved(slots_.push(*call.ticket, metadata_.tokens, routing_.rows_per_rank()));
}

void CpuBackend::carve_backward(const BackwardCall& call) {
  place_scratch();
  if (call.ticket) place_saved(slots_.layer(*call.ticket));
}

DenseRows CpuBackend::rows_at(std::int64_t offset, std::int64_t width) const {
  return {reinterpret_cast<BF16*>(memory_.activations().data() + offset), width};
}

/// The regions of a call that keeps nothing.
void CpuBackend::place_scratch() {
  const LayerDims dims = layer_dims(setup_.config);
  const RegionOffsets scratch =
      scratch_layout(dims, routing_.num_rows(), std::ssize(memory_.activations()));
  note_scratch(scratch.bytes);
  x_ = rows_at(scratch.x, dims.hidden_dim);
  h1_ = rows_at(scratch.h1, 2 * dims.intermediate_dim);
  h2_ = rows_at(scratch.h2, dims.intermediate_dim);
  h3_ = x_;
  kept_x_ = {};
  kept_h3_ = {};
  is_recomputed_ = false;
  if (dims.inference) return;
  grad_h1_ = rows_at(scratch.grad_h1, h1_.width);
  grad_h2_ = rows_at(scratch.grad_h2, h2_.width);
  grad_h3_ = rows_at(scratch.grad_h3, x_.width);
  route_grad_ = x_;
}

/// The regions that a slot keeps stand there instead.
void CpuBackend::place_saved(const SavedLayer& layer) {
  const LayerDims dims = layer_dims(setup_.config);
  const std::int64_t begin = slots_.slot_offset(layer.slot) + layer.offset;
  is_recomputed_ = layer.is_recomputed;
  if (is_recomputed_) {
    kept_x_ = rows_at(begin, dims.hidden_dim);
    return;
  }
  const std::int64_t tokens = metadata_.tokens[static_cast<std::size_t>(setup_.rank)];
  const RegionOffsets saved = saved_layout(dims, tokens, routing_.num_rows(), begin);
  h1_ = rows_at(saved.h1, h1_.width);
  if (dims.activation_policy == ActivationPolicy::kLean) {
    kept_x_ = rows_at(saved.x, dims.hidden_dim);
    return;
  }
  // h3 of this rank's rows stays in scratch, where x is not.
  x_ = rows_at(saved.x, dims.hidden_dim);
  kept_h3_ = rows_at(saved.h3, dims.hidden_dim);
}

void CpuBackend::note_scratch(std::int64_t bytes) {
  const std::int64_t device = std::min(bytes, setup_.plan.device_scratch_bytes);
  peaks_.device_scratch_bytes = std::max(peaks_.device_scratch_bytes, device);
  peaks_.host_scratch_bytes = std::max(peaks_.host_scratch_bytes, bytes - device);
}

void CpuBackend::rewind(const SlotTicket& ticket) { slots_.pop(ticket); }

void CpuBackend::discard(const SlotTicket& ticket, void* /*stream*/) { rewind(ticket); }

void CpuBackend::reset_slots() {
  slots_.reset();
  peaks_ = {};
}

RegionPeaks CpuBackend::region_peaks() {
  RegionPeaks peaks = peaks_;
  for (std::int64_t slot = 0; slot < slots_.num_slots(); ++slot) {
    peaks.slot_bytes.push_back(slots_.peak_bytes(slot));
  }
  return peaks;
}

}  // namespace distmoe::cpu
