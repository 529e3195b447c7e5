// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "backend/backend.hpp"
#include "distmoe/tensor.hpp"
#include "plan/slot_ledger.hpp"

namespace distmoe {

/// What the backward's arguments must fit.
struct SavedShape {
  std::int64_t num_tokens = 0;
  DType score_dtype = DType::kF32;
  bool has_bias13 = false;
  bool has_bias2 = false;
  std::optional<NormCall> norm{};
};

/// The state of a SavedForward; of no forward until it is set.
class SavedForwardImpl {
 public:
  void set(const std::shared_ptr<SlotLedger>& slots, const SlotTicket& ticket,
           const SavedShape& shape) noexcept {
    slots_ = slots;
    ticket_ = ticket;
    shape_ = shape;
  }
  /// It had its backward, or was discarded: what becomes of it does not touch the slots any more.
  void finish() noexcept { slots_.reset(); }

  const SlotTicket& ticket() const { return ticket_; }
  const SavedShape& shape() const { return shape_; }
  /// Of the context; null once that is closed, and of a forward that is finished.
  std::shared_ptr<SlotLedger> slots() const { return slots_.lock(); }

 private:
  std::weak_ptr<SlotLedger> slots_;
  SlotTicket ticket_;
  SavedShape shape_;
};

}  // namespace distmoe
