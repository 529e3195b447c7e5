// SPDX-License-Identifier: Apache-2.0
//
// The transitions of an activation slot: save or recompute, rewind, reset. Plain functions over
// plain structs, compiled alike for the host and for a one-thread kernel; docs/memory-plan.md has
// the reasons.
//
//   full_r = saved bytes of rank r, x_r = its input, x = the input of max_tokens
//   worst = max_r(saved[r] + full_r); after = layers of the slot - 1 - live layers
//   recompute  <=>  worst + after*x > slot bytes
//
// Every rank holds the saved[] of all ranks and learns the tokens and rows of all ranks, so all
// decide alike without a message. Invariant: max_r saved[r] + (layers to come)*x <= slot bytes,
// hence an input always fits.
#pragma once

#include <cstdint>

#include "formats/host_device.hpp"
#include "plan/layer_bytes.hpp"

namespace distmoe {

/// What every decision of a context shares.
struct SlotLimits {
  LayerDims shape;
  std::int64_t max_tokens = 0;
  std::int64_t slot_bytes = 0;
  std::int32_t ep_size = 1;
  std::int32_t rank = 0;
};

/// State of one slot on this rank.
struct SlotState {
  std::int64_t cursor = 0;       // bytes in use, from the slot's start; equals saved[rank]
  std::int64_t live_layers = 0;  // forwards whose backward is to come
  std::int64_t peak_bytes = 0;   // largest cursor since the reset
};

/// A slot and the bytes that every rank keeps in it: P values.
struct SlotRef {
  SlotState* state = nullptr;
  std::int64_t* saved_P = nullptr;
};

/// Tokens and received rows (padded where the precision pads) of every rank in one call: P values.
struct CallRows {
  const std::int64_t* tokens_P = nullptr;
  const std::int64_t* rows_P = nullptr;
};

/// What a forward carries to its backward, beside the saved[] before it.
struct SavedLayer {
  std::int64_t slot = 0;
  std::int64_t layer = 0;   // index from the bottom of the slot
  std::int64_t offset = 0;  // of its first byte in the slot
  std::int64_t bytes = 0;
  bool is_recomputed = false;
  bool is_live = false;  // false for a call that failed: its backward changes nothing
};

enum class SlotStep : std::int32_t {
  kDone,
  kSlotFull,  // as many live layers as the slot is to hold
  kNotTop,    // a later forward of the slot still waits for its backward
};

/// Whether the next forward of `slot` recomputes. `slot_layers` is the depth that was selected.
DISTMOE_HOST_DEVICE constexpr bool must_recompute(const SlotLimits& limits,
                                                  std::int64_t slot_layers, const CallRows& call,
                                                  const SlotRef& slot) {
  const LayerBytes<> layer{limits.shape};
  std::int64_t worst = 0;
  for (std::int32_t r = 0; r < limits.ep_size; ++r) {
    const std::int64_t used = slot.saved_P[r] + layer.saved(call.tokens_P[r], call.rows_P[r]);
    if (used > worst) worst = used;
  }
  const std::int64_t after = slot_layers - 1 - slot.state->live_layers;
  return worst + after * layer.input(limits.max_tokens) > limits.slot_bytes;
}

/// Takes the bytes of one forward. Writes `saved_before_P` (P values, for the rewind) and `out`;
/// writes nothing unless it returns kDone. The slot index of `out` is the caller's.
DISTMOE_HOST_DEVICE constexpr SlotStep push_layer(const SlotLimits& limits,
                                                  std::int64_t slot_layers, const CallRows& call,
                                                  const SlotRef& slot, std::int64_t* saved_before_P,
                                                  SavedLayer& out) {
  SlotState& state = *slot.state;
  if (state.live_layers >= slot_layers) return SlotStep::kSlotFull;
  const LayerBytes<> layer{limits.shape};
  out.is_recomputed = must_recompute(limits, slot_layers, call, slot);
  out.layer = state.live_layers;
  out.offset = state.cursor;
  out.is_live = true;
  for (std::int32_t r = 0; r < limits.ep_size; ++r) {
    saved_before_P[r] = slot.saved_P[r];
    slot.saved_P[r] += out.is_recomputed ? layer.input(call.tokens_P[r])
                                         : layer.saved(call.tokens_P[r], call.rows_P[r]);
  }
  state.cursor = slot.saved_P[limits.rank];
  out.bytes = state.cursor - out.offset;
  state.live_layers += 1;
  if (state.cursor > state.peak_bytes) state.peak_bytes = state.cursor;
  return SlotStep::kDone;
}

/// Gives back the bytes of the slot's last live forward, at the end of its backward.
DISTMOE_HOST_DEVICE constexpr SlotStep pop_layer(const SlotLimits& limits, const SavedLayer& saved,
                                                 const std::int64_t* saved_before_P,
                                                 const SlotRef& slot) {
  if (!saved.is_live) return SlotStep::kDone;
  SlotState& state = *slot.state;
  if (state.live_layers != saved.layer + 1) return SlotStep::kNotTop;
  for (std::int32_t r = 0; r < limits.ep_size; ++r) slot.saved_P[r] = saved_before_P[r];
  state.cursor = saved.offset;
  state.live_layers = saved.layer;
  return SlotStep::kDone;
}

/// Empties the slot, whatever it held.
DISTMOE_HOST_DEVICE constexpr void reset_slot(const SlotLimits& limits, const SlotRef& slot) {
  *slot.state = SlotState{};
  for (std::int32_t r = 0; r < limits.ep_size; ++r) slot.saved_P[r] = 0;
}

}  // namespace distmoe
