// SPDX-License-Identifier: Apache-2.0
//
// The bytes that one rank keeps in every activation slot, where the host decides: the records of
// planned memory, moved by the transitions of slot_planner.hpp. Which forwards are live is the
// ledger's to know (slot_ledger.hpp).
#pragma once

#include <cstdint>
#include <span>

#include "distmoe/config.hpp"
#include "distmoe/memory_plan.hpp"
#include "plan/slot_ledger.hpp"
#include "plan/slot_planner.hpp"

namespace distmoe {

/// Control memory of the plan (layout/context_buffers.hpp); more elements than named do no harm.
struct SlotRecords {
  std::span<SlotState> states;           ///< [slots]
  std::span<std::int64_t> saved;         ///< [slots, P] bytes of every rank
  std::span<SavedLayer> layers;          ///< [slots, N]
  std::span<std::int64_t> saved_before;  ///< [slots, N, P] `saved` before a layer
};

/// Nothing is allocated, ever.
class SlotStacks {
 public:
  /// All slots are empty at first. `plan` is plan_memory's of `config` for `ep_size` ranks.
  SlotStacks(const Config& config, const MemoryPlan& plan, int ep_size, int rank,
             SlotRecords records);

  /// Takes the bytes of the forward of `ticket` and decides whether it saves. Spans have a value
  /// for every rank: tokens, and received rows with the padding of the precision.
  const SavedLayer& push(const SlotTicket& ticket, std::span<const std::int64_t> tokens_P,
                         std::span<const std::int64_t> rows_P);
  /// What push() decided, until pop().
  const SavedLayer& layer(const SlotTicket& ticket) const {
    return records_.layers[layer_index(ticket)];
  }
  /// Gives the bytes back, at the end of the backward. The ledger has found it the last live one.
  void pop(const SlotTicket& ticket);
  void reset() noexcept;

  /// Where the slot starts in the activation buffer.
  std::int64_t slot_offset(std::int64_t slot) const { return slot * limits_.slot_bytes; }
  std::int64_t used_bytes(std::int64_t slot) const { return state(slot).cursor; }
  /// The most bytes that the slot held since the last reset().
  std::int64_t peak_bytes(std::int64_t slot) const { return state(slot).peak_bytes; }
  std::int64_t num_slots() const { return num_slots_; }

 private:
  std::size_t layer_index(const SlotTicket& ticket) const {
    return static_cast<std::size_t>(ticket.slot * max_layers_ + ticket.layer);
  }
  const SlotState& state(std::int64_t slot) const {
    return records_.states[static_cast<std::size_t>(slot)];
  }
  SlotRef slot_ref(std::int64_t slot) const;
  std::int64_t* saved_before(const SlotTicket& ticket) const;

  SlotLimits limits_;
  std::int64_t max_layers_;
  std::int64_t num_slots_;
  SlotRecords records_;
};

}  // namespace distmoe
