// SPDX-License-Identifier: Apache-2.0
//
// The slots of one rank outside a context: the ledger, and stacks over records of exactly the
// planned size.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "plan/slot_stacks.hpp"

namespace distmoe {

struct LiveForward {
  SlotTicket ticket;
  SavedLayer saved;
};

class RankSlots {
 public:
  RankSlots(const Config& config, const MemoryPlan& plan, int ep_size, int rank)
      : records_(
            std::make_unique<Records>(plan, config.max_moe_layers_per_activation_slot, ep_size)),
        ledger_(plan.num_slots, config.max_moe_layers_per_activation_slot),
        stacks_(config, plan, ep_size, rank,
                {records_->states, records_->saved, records_->layers, records_->saved_before}) {}

  void select(std::int64_t slot, std::int64_t num_layers) { ledger_.select(slot, num_layers); }
  LiveForward push(std::span<const std::int64_t> tokens_P, std::span<const std::int64_t> rows_P) {
    const SlotTicket ticket = ledger_.next();
    const LiveForward forward{ticket, stacks_.push(ticket, tokens_P, rows_P)};
    ledger_.push();
    return forward;
  }
  void pop(const LiveForward& forward) {
    ledger_.check_backward(forward.ticket);
    stacks_.pop(forward.ticket);
    ledger_.pop(forward.ticket);
  }
  void abandon(const LiveForward& forward) { ledger_.abandon(forward.ticket); }
  void reset() {
    ledger_.reset();
    stacks_.reset();
  }

  const SlotLedger& ledger() const { return ledger_; }
  std::int64_t slot_offset(std::int64_t slot) const { return stacks_.slot_offset(slot); }
  std::int64_t used_bytes(std::int64_t slot) const { return stacks_.used_bytes(slot); }
  std::int64_t peak_bytes(std::int64_t slot) const { return stacks_.peak_bytes(slot); }

 private:
  struct Records {
    Records(const MemoryPlan& plan, std::int64_t max_layers, int ep_size)
        : states(static_cast<std::size_t>(plan.num_slots)),
          saved(static_cast<std::size_t>(plan.num_slots * ep_size)),
          layers(static_cast<std::size_t>(plan.num_slots * max_layers)),
          saved_before(static_cast<std::size_t>(plan.num_slots * max_layers * ep_size)) {}
    std::vector<SlotState> states;
    std::vector<std::int64_t> saved;
    std::vector<SavedLayer> layers;
    std::vector<std::int64_t> saved_before;
  };

  std::unique_ptr<Records> records_;
  SlotLedger ledger_;
  SlotStacks stacks_;
};

}  // namespace distmoe
