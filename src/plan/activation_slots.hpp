// SPDX-License-Identifier: Apache-2.0
//
// The activation slots of one rank where the host decides: the ledger of calls and the bytes of
// every slot, moved together by the transitions of slot_planner.hpp.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "distmoe/config.hpp"
#include "distmoe/memory_plan.hpp"
#include "plan/slot_ledger.hpp"
#include "plan/slot_planner.hpp"

namespace distmoe {

/// A live forward: who it is and where its bytes are.
struct LiveForward {
  SlotTicket ticket;
  SavedLayer saved;
};

/// Every call that throws leaves the slots as they were. Nothing is allocated after construction.
class ActivationSlots {
 public:
  /// `plan` is plan_memory's of `config` for `ep_size` ranks.
  ActivationSlots(const Config& config, const MemoryPlan& plan, int ep_size, int rank);

  void select(std::int64_t slot, std::int64_t num_layers) { ledger_.select(slot, num_layers); }
  /// Takes the bytes of a saving forward in the selected slot and decides whether it saves. Spans
  /// have a value for every rank: tokens, and received rows with the padding of the precision.
  LiveForward push(std::span<const std::int64_t> tokens_P, std::span<const std::int64_t> rows_P);
  /// Gives the bytes back, at the end of the backward.
  void pop(const LiveForward& forward);
  void abandon(const LiveForward& forward) noexcept { ledger_.abandon(forward.ticket); }
  void reset() noexcept;

  const SlotLedger& ledger() const { return ledger_; }
  /// Where the slot starts in the activation buffer.
  std::int64_t slot_offset(std::int64_t slot) const { return slot * limits_.slot_bytes; }
  std::int64_t used_bytes(std::int64_t slot) const { return state(slot).cursor; }
  /// The most bytes that the slot held since the last reset().
  std::int64_t peak_bytes(std::int64_t slot) const { return state(slot).peak_bytes; }

 private:
  const SlotState& state(std::int64_t slot) const {
    return states_[static_cast<std::size_t>(slot)];
  }
  SlotRef slot_ref(std::int64_t slot);
  std::int64_t* saved_before(std::int64_t slot, std::int64_t layer);

  SlotLimits limits_;
  std::int64_t max_layers_;
  SlotLedger ledger_;
  std::vector<SlotState> states_;
  std::vector<std::int64_t> saved_;         // [slot][rank]
  std::vector<std::int64_t> saved_before_;  // [slot][layer][rank]
};

}  // namespace distmoe
