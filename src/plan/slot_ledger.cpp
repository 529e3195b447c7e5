// SPDX-License-Identifier: Apache-2.0
#include "plan/slot_ledger.hpp"

#include "core/check.hpp"

namespace distmoe {
namespace {

/// Where `serial` is in a stack of live forwards; its size where it is not. Serials grow to the
/// top, where that of a backward is: the search starts there.
std::size_t position_of(const std::vector<std::uint64_t>& live, std::uint64_t serial) {
  std::size_t end = live.size();
  while (end > 0 && live[end - 1] > serial) --end;
  return end > 0 && live[end - 1] == serial ? end - 1 : live.size();
}

}  // namespace

SlotLedger::SlotLedger(std::int64_t num_slots, std::int64_t max_layers)
    : max_layers_(max_layers), slots_(static_cast<std::size_t>(num_slots)) {
  for (Slot& slot : slots_) {
    slot.num_layers = max_layers;
    slot.live_serials.reserve(static_cast<std::size_t>(max_layers));
  }
}

std::int64_t SlotLedger::num_live(std::int64_t slot) const {
  return static_cast<std::int64_t>(slots_[static_cast<std::size_t>(slot)].live_serials.size());
}

std::int64_t SlotLedger::slot_layers(std::int64_t slot) const {
  return slots_[static_cast<std::size_t>(slot)].num_layers;
}

void SlotLedger::select(std::int64_t slot, std::int64_t num_layers) {
  if (slots_.empty()) return;
  DISTMOE_CHECK(slot >= 0 && slot < static_cast<std::int64_t>(slots_.size()), kInvalidArgument,
                "activation slot ", slot, " does not exist; legal is 0 to ", slots_.size() - 1);
  DISTMOE_CHECK(num_layers >= 1 && num_layers <= max_layers_, kInvalidArgument,
                "num_moe_layers of activation slot ", slot, " is ", num_layers,
                "; legal is 1 to max_moe_layers_per_activation_slot, which is ", max_layers_);
  Slot& chosen = slots_[static_cast<std::size_t>(slot)];
  const std::int64_t live = num_live(slot);
  DISTMOE_CHECK(live == 0 || (num_layers >= live && num_layers <= chosen.num_layers),
                kInvalidArgument, "num_moe_layers of activation slot ", slot, " is ", num_layers,
                "; ", live, " forward(s) wait for their backward there, legal is ", live, " to ",
                chosen.num_layers);
  chosen.num_layers = num_layers;
  selected_ = slot;
}

void SlotLedger::check_usable(std::int64_t slot) const {
  const std::int64_t abandoned = slots_[static_cast<std::size_t>(slot)].abandoned_layer;
  DISTMOE_CHECK(abandoned < 0, kInvalidArgument, "activation slot ", slot,
                " needs reset(): the saved forward of its layer ", abandoned,
                " was destroyed before its backward");
}

SlotTicket SlotLedger::next() const {
  DISTMOE_CHECK(!slots_.empty(), kInvalidArgument,
                "this context has no activation slots; an inference context saves nothing");
  check_usable(selected_);
  DISTMOE_CHECK(num_live(selected_) < slot_layers(selected_), kInvalidArgument, "activation slot ",
                selected_, " holds ", num_live(selected_),
                " forward(s) that wait for their backward; it was selected for ",
                slot_layers(selected_), ". Run a backward, select another slot or reset()");
  return {selected_, num_live(selected_), slot_layers(selected_), next_serial_, epoch_};
}

SlotTicket SlotLedger::push() {
  const SlotTicket ticket = next();
  slots_[static_cast<std::size_t>(selected_)].live_serials.push_back(next_serial_);
  ++next_serial_;
  return ticket;
}

void SlotLedger::check_backward(const SlotTicket& ticket) const {
  DISTMOE_CHECK(ticket.epoch == epoch_, kInvalidArgument, "the saved forward of layer ",
                ticket.layer, " in activation slot ", ticket.slot,
                " is from before a reset(); its activations are gone");
  check_usable(ticket.slot);
  const auto& live = slots_[static_cast<std::size_t>(ticket.slot)].live_serials;
  const std::size_t position = position_of(live, ticket.serial);
  DISTMOE_CHECK(position != live.size(), kInvalidArgument, "the forward of layer ", ticket.layer,
                " in activation slot ", ticket.slot, " had its backward already");
  DISTMOE_CHECK(position + 1 == live.size(), kInvalidArgument, "the forward of layer ",
                ticket.layer, " in activation slot ", ticket.slot, " is not the last one: layer ",
                live.size() - 1, " waits for its backward first (a slot is a stack)");
}

void SlotLedger::pop(const SlotTicket& ticket) {
  check_backward(ticket);
  slots_[static_cast<std::size_t>(ticket.slot)].live_serials.pop_back();
}

bool SlotLedger::is_live(const SlotTicket& ticket) const noexcept {
  if (ticket.epoch != epoch_ || ticket.slot >= std::ssize(slots_)) return false;
  const auto& live = slots_[static_cast<std::size_t>(ticket.slot)].live_serials;
  return position_of(live, ticket.serial) != live.size();
}

void SlotLedger::abandon(const SlotTicket& ticket) noexcept {
  if (!is_live(ticket)) return;
  Slot& slot = slots_[static_cast<std::size_t>(ticket.slot)];
  if (slot.abandoned_layer < 0) slot.abandoned_layer = ticket.layer;
}

void SlotLedger::reset() noexcept {
  for (Slot& slot : slots_) {
    slot.num_layers = max_layers_;
    slot.live_serials.clear();
    slot.abandoned_layer = -1;
  }
  selected_ = 0;
  ++epoch_;
}

}  // namespace distmoe
