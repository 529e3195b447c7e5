// SPDX-License-Identifier: Apache-2.0
//
// What the host knows of the activation slots: which one is selected, which forwards wait for their
// backward, and which slot needs a reset. It depends on the order of calls alone, never on routing,
// so it is the same on every rank and right also where decisions are taken on a device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace distmoe {

/// Names one live forward. A ticket of before a reset() is stale.
struct SlotTicket {
  std::int64_t slot = 0;
  std::int64_t layer = 0;        // index from the bottom of the slot
  std::int64_t slot_layers = 0;  // depth of the slot that the forward was planned with
  std::uint64_t serial = 0;      // of the forward, within this ledger
  std::uint64_t epoch = 0;       // number of resets before it
};

/// Every call that throws leaves the ledger as it was.
class SlotLedger {
 public:
  /// An inference context has no slots: num_slots = 0, and select() does nothing.
  SlotLedger(std::int64_t num_slots, std::int64_t max_layers);

  /// Makes `slot` the one of the forwards to come, to hold `num_layers` of them at a time. Throws
  /// invalid_argument for a slot that does not exist, a depth outside [1, max_layers], or a depth
  /// of a slot in use that is more than it was selected with (its earlier forwards left no room) or
  /// less than its live layers.
  void select(std::int64_t slot, std::int64_t num_layers);
  std::int64_t selected_slot() const { return selected_; }
  std::int64_t num_live(std::int64_t slot) const;
  std::int64_t slot_layers(std::int64_t slot) const;

  /// The ticket of a saving forward in the selected slot, as the next push() takes it. Throws
  /// invalid_argument where the slot is full or needs a reset.
  SlotTicket next() const;
  /// Registers the forward of `next()`.
  SlotTicket push();
  /// Whether the forward of `ticket` waits for its backward.
  bool is_live(const SlotTicket& ticket) const noexcept;
  /// Throws invalid_argument where the forward of `ticket` is not the last live one of its slot, is
  /// stale, or its slot needs a reset.
  void check_backward(const SlotTicket& ticket) const;
  /// Ends the forward of `ticket`, after its backward.
  void pop(const SlotTicket& ticket);
  /// The forward of `ticket` will never see its backward: its slot needs a reset. Stale tickets are
  /// ignored.
  void abandon(const SlotTicket& ticket) noexcept;

  /// Empties all slots and selects slot 0 with the full depth.
  void reset() noexcept;

 private:
  struct Slot {
    std::int64_t num_layers = 0;              // selected depth
    std::vector<std::uint64_t> live_serials;  // bottom to top; capacity is the full depth
    std::int64_t abandoned_layer = -1;
  };

  void check_usable(std::int64_t slot) const;

  std::int64_t max_layers_;
  std::int64_t selected_ = 0;
  std::uint64_t next_serial_ = 1;
  std::uint64_t epoch_ = 0;
  std::vector<Slot> slots_;
};

}  // namespace distmoe
