// SPDX-License-Identifier: Apache-2.0
//
// Step 2b: where the rows of a call lie. Its scratch ends where the activation buffer ends; a
// saving call's regions stand in its slot, whole or, where the slot has no room, its input alone.
// Its backward finds them there.
//
// Block-scaled: codes of rows take turns in one region, those of h2 behind those of x where the
// pipeline is mega; h2 as BF16 lies where grad_h2 will (inference: over h1, which it does not
// keep), grad_h1 over the h1 of scratch. h3, grad_h3 and the route gradients, one after the other,
// have a buffer of their own.
#include <algorithm>

#include "backend/cpu/cpu_backend.hpp"

namespace distmoe::cpu {

void CpuBackend::carve(const ForwardCall& call) {
  place_scratch();
  if (!call.ticket) return;
  place_saved(slots_.push(*call.ticket, metadata_.tokens, routing_.placed_rows_per_rank()));
}

void CpuBackend::carve_backward(const BackwardCall& call) {
  place_scratch();
  if (has_codes()) place_gradient_columns(call);
  if (call.ticket) place_saved(slots_.layer(*call.ticket));
}

DenseRows CpuBackend::rows_at(std::int64_t offset, std::int64_t width) const {
  return {reinterpret_cast<BF16*>(memory_.activations().data() + offset), width};
}

CodedRows CpuBackend::coded_rows_at(std::int64_t offset, std::int64_t width) const {
  return {setup_.config.precision, memory_.activations().data() + offset,
          routing_.num_placed_rows(), width};
}

CodedColumns CpuBackend::coded_columns_at(std::int64_t offset, std::int64_t width) const {
  return {memory_.activations().data() + offset, routing_.num_placed_rows(), width};
}

/// The regions of a call that keeps nothing.
void CpuBackend::place_scratch() {
  const LayerDims dims = layer_dims(setup_.config);
  const RegionOffsets scratch =
      scratch_layout(dims, routing_.num_placed_rows(), std::ssize(memory_.activations()));
  note_scratch(scratch.bytes);
  kept_x_ = {};
  kept_h3_ = {};
  is_recomputed_ = false;
  if (has_codes()) {
    place_coded_scratch(scratch);
    return;
  }
  x_ = rows_at(scratch.x, dims.hidden_dim);
  h1_ = rows_at(scratch.h1, 2 * dims.intermediate_dim);
  h2_ = rows_at(scratch.h2, dims.intermediate_dim);
  h3_ = x_;
  if (dims.inference) return;
  grad_h1_ = rows_at(scratch.grad_h1, h1_.width);
  grad_h2_ = rows_at(scratch.grad_h2, h2_.width);
  grad_h3_ = rows_at(scratch.grad_h3, x_.width);
  route_grad_ = x_;
}

void CpuBackend::place_coded_scratch(const RegionOffsets& scratch) {
  const LayerDims dims = layer_dims(setup_.config);
  const std::int64_t rows = routing_.num_placed_rows();
  coded_x_ = coded_rows_at(scratch.quantised_rows, dims.hidden_dim);
  const bool has_both = dims.pipeline == Pipeline::kMega;
  coded_h2_ = coded_rows_at(
      scratch.quantised_rows + (has_both ? LayerBytes<>{dims}.row(rows, dims.hidden_dim) : 0),
      dims.intermediate_dim);
  h1_ = rows_at(scratch.h1, 2 * dims.intermediate_dim);
  h2_ = rows_at(dims.inference ? scratch.h1 : scratch.grad_h2, dims.intermediate_dim);
  h3_ = {memory_.buffer_of<BF16>(buffer_name::kRouteResults).data(), dims.hidden_dim};
  x_columns_ = h2_columns_ = grad_h3_columns_ = grad_h1_columns_ = {};
  if (dims.inference) return;
  coded_grad_h3_ = coded_rows_at(scratch.quantised_rows, dims.hidden_dim);
  coded_grad_h1_ = coded_rows_at(scratch.quantised_rows, 2 * dims.intermediate_dim);
  grad_h1_ = h1_;
  grad_h2_ = h2_;
  grad_h3_ = route_grad_ = h3_;
}

/// Codes across rows are made for the weights' gradients that the call asks for.
void CpuBackend::place_gradient_columns(const BackwardCall& call) {
  const LayerDims dims = layer_dims(setup_.config);
  const RegionOffsets scratch =
      scratch_layout(dims, routing_.num_placed_rows(), std::ssize(memory_.activations()));
  if (call.grad_w13_L2FD.data != nullptr) {
    x_columns_ = coded_columns_at(scratch.x, dims.hidden_dim);
    grad_h1_columns_ = coded_columns_at(scratch.grad_h1, 2 * dims.intermediate_dim);
  }
  if (call.grad_w2_LDF.data != nullptr) {
    h2_columns_ = coded_columns_at(scratch.h2, dims.intermediate_dim);
    grad_h3_columns_ = coded_columns_at(scratch.grad_h3, dims.hidden_dim);
  }
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
  const RegionOffsets saved = saved_layout(dims, tokens, routing_.num_placed_rows(), begin);
  h1_ = rows_at(saved.h1, h1_.width);
  if (dims.activation_policy == ActivationPolicy::kLean) {
    kept_x_ = rows_at(saved.x, dims.hidden_dim);
    return;
  }
  // h3 of this rank's rows stays in scratch, where x is not.
  if (has_codes()) {
    x_columns_ = coded_columns_at(saved.x, dims.hidden_dim);
    h2_columns_ = coded_columns_at(saved.h2, dims.intermediate_dim);
  } else {
    x_ = rows_at(saved.x, dims.hidden_dim);
  }
  kept_h3_ = rows_at(saved.h3, dims.hidden_dim);
}

void CpuBackend::note_scratch(std::int64_t bytes) {
  scratch_bytes_ = bytes;
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
