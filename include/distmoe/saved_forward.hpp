// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "distmoe/export.hpp"

namespace distmoe {

class SavedForwardImpl;

/// What a saving forward hands to its backward: the slot that keeps its activations (or its input,
/// where the slot had no room for more), and its routing, ids and scores, all in memory of its
/// context. Used by the thread that uses the context.
///
/// Its destruction before the backward makes the slot unusable until Context::reset(). It may
/// outlive its context.
class DISTMOE_EXPORT SavedForward {
 public:
  SavedForward() noexcept;                                                 ///< of no forward
  explicit SavedForward(std::unique_ptr<SavedForwardImpl> impl) noexcept;  ///< for distmoe itself
  SavedForward(SavedForward&& other) noexcept;
  /// What was held before is destroyed.
  SavedForward& operator=(SavedForward&& other) noexcept;
  SavedForward(const SavedForward&) = delete;
  SavedForward& operator=(const SavedForward&) = delete;
  ~SavedForward();

  /// Whether the slot still keeps it: there was no backward yet, and the context was neither reset
  /// nor closed since the forward. In a slot that needs reset() no backward can come all the same.
  bool is_live() const noexcept;
  /// Where it is kept; -1 where this is of no forward.
  std::int64_t slot() const noexcept;
  std::int64_t slot_layer() const noexcept;  ///< from the bottom of the slot

  SavedForwardImpl* impl() const noexcept { return impl_.get(); }  ///< for distmoe itself

 private:
  std::unique_ptr<SavedForwardImpl> impl_;
};

}  // namespace distmoe
