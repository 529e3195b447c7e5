// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "plan/slot_ledger.hpp"

namespace distmoe {

/// The state of a SavedForward.
class SavedForwardImpl {
 public:
  explicit SavedForwardImpl(const std::shared_ptr<SlotLedger>& slots) : slots_(slots) {}
  void set_ticket(const SlotTicket& ticket) { ticket_ = ticket; }

  const SlotTicket& ticket() const { return ticket_; }
  /// Of the context; null once that is closed.
  std::shared_ptr<SlotLedger> slots() const { return slots_.lock(); }

 private:
  std::weak_ptr<SlotLedger> slots_;
  SlotTicket ticket_;
};

}  // namespace distmoe
