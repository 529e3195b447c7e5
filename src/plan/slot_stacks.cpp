// SPDX-License-Identifier: Apache-2.0
#include "plan/slot_stacks.hpp"

#include "core/check.hpp"
#include "layout/context_buffers.hpp"

namespace distmoe {

static_assert(sizeof(SlotState) == kSlotStateBytes);
static_assert(sizeof(SavedLayer) == kSavedLayerBytes);

SlotStacks::SlotStacks(const Config& config, const MemoryPlan& plan, int ep_size, int rank,
                       SlotRecords records)
    : limits_{layer_dims(config), config.max_tokens, plan.slot_bytes, ep_size, rank},
      max_layers_(config.max_moe_layers_per_activation_slot),
      num_slots_(plan.num_slots),
      records_(records) {
  reset();
}

SlotRef SlotStacks::slot_ref(std::int64_t slot) const {
  return {&records_.states[static_cast<std::size_t>(slot)],
          records_.saved.data() + slot * limits_.ep_size};
}

std::int64_t* SlotStacks::saved_before(const SlotTicket& ticket) const {
  return records_.saved_before.data() +
         static_cast<std::int64_t>(layer_index(ticket)) * limits_.ep_size;
}

const SavedLayer& SlotStacks::push(const SlotTicket& ticket, std::span<const std::int64_t> tokens_P,
                                   std::span<const std::int64_t> rows_P) {
  DISTMOE_CHECK(std::ssize(tokens_P) >= limits_.ep_size && std::ssize(rows_P) >= limits_.ep_size,
                kInternal, "tokens of ", tokens_P.size(), " and rows of ", rows_P.size(),
                " ranks for a group of ", limits_.ep_size);
  DISTMOE_CHECK(state(ticket.slot).live_layers == ticket.layer, kInternal, "activation slot ",
                ticket.slot, " and its ledger disagree");
  SavedLayer& layer = records_.layers[layer_index(ticket)];
  layer = SavedLayer{.slot = ticket.slot};
  const SlotStep step = push_layer(limits_, ticket.slot_layers, {tokens_P.data(), rows_P.data()},
                                   slot_ref(ticket.slot), saved_before(ticket), layer);
  DISTMOE_CHECK(step == SlotStep::kDone, kInternal, "activation slot ", ticket.slot,
                " is fuller than its ledger says");
  return layer;
}

void SlotStacks::pop(const SlotTicket& ticket) {
  const SlotStep step =
      pop_layer(limits_, layer(ticket), saved_before(ticket), slot_ref(ticket.slot));
  DISTMOE_CHECK(step == SlotStep::kDone, kInternal, "activation slot ", ticket.slot,
                " and its ledger disagree");
}

void SlotStacks::reset() noexcept {
  for (std::int64_t slot = 0; slot < num_slots_; ++slot) reset_slot(limits_, slot_ref(slot));
}

}  // namespace distmoe
