// SPDX-License-Identifier: Apache-2.0
#include "plan/activation_slots.hpp"

#include "core/checked_math.hpp"

namespace distmoe {

ActivationSlots::ActivationSlots(const Config& config, const MemoryPlan& plan, int ep_size,
                                 int rank)
    : limits_{layer_dims(config), config.max_tokens, plan.slot_bytes, ep_size, rank},
      max_layers_(config.max_moe_layers_per_activation_slot),
      ledger_(plan.num_slots, max_layers_),
      states_(static_cast<std::size_t>(plan.num_slots)),
      saved_(static_cast<std::size_t>(checked_mul(plan.num_slots, ep_size))),
      saved_before_(
          static_cast<std::size_t>(checked_product(plan.num_slots, max_layers_, ep_size))) {}

SlotRef ActivationSlots::slot_ref(std::int64_t slot) {
  return {&states_[static_cast<std::size_t>(slot)], saved_.data() + slot * limits_.ep_size};
}

std::int64_t* ActivationSlots::saved_before(std::int64_t slot, std::int64_t layer) {
  return saved_before_.data() + (slot * max_layers_ + layer) * limits_.ep_size;
}

LiveForward ActivationSlots::push(std::span<const std::int64_t> tokens_P,
                                  std::span<const std::int64_t> rows_P) {
  DISTMOE_CHECK(std::ssize(tokens_P) == limits_.ep_size && std::ssize(rows_P) == limits_.ep_size,
                kInternal, "tokens of ", tokens_P.size(), " and rows of ", rows_P.size(),
                " ranks for a group of ", limits_.ep_size);
  LiveForward forward;
  forward.ticket = ledger_.push();
  forward.saved.slot = forward.ticket.slot;
  const SlotStep step =
      push_layer(limits_, forward.ticket.slot_layers, {tokens_P.data(), rows_P.data()},
                 slot_ref(forward.ticket.slot),
                 saved_before(forward.ticket.slot, forward.ticket.layer), forward.saved);
  DISTMOE_CHECK(step == SlotStep::kDone && forward.saved.layer == forward.ticket.layer, kInternal,
                "activation slot ", forward.ticket.slot, " and its ledger disagree");
  return forward;
}

void ActivationSlots::pop(const LiveForward& forward) {
  ledger_.pop(forward.ticket);
  const SlotStep step =
      pop_layer(limits_, forward.saved, saved_before(forward.ticket.slot, forward.ticket.layer),
                slot_ref(forward.ticket.slot));
  DISTMOE_CHECK(step == SlotStep::kDone, kInternal, "activation slot ", forward.ticket.slot,
                " and its ledger disagree");
}

void ActivationSlots::reset() noexcept {
  ledger_.reset();
  for (std::int64_t slot = 0; slot < std::ssize(states_); ++slot) {
    reset_slot(limits_, slot_ref(slot));
  }
}

}  // namespace distmoe
