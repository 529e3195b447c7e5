// SPDX-License-Identifier: Apache-2.0
#include "shared_context.hpp"

#include <algorithm>
#include <functional>

#include "distmoe/error.hpp"

namespace distmoe::python {

HeldForward::~HeldForward() {
  if (const auto owner = owner_.lock()) owner->drop({std::move(saved), is_expendable, stream_});
}

void SharedContext::drop(DroppedForward dropped) {
  // One that had its backward, or is of no forward, has nothing to say.
  if (dropped.saved.impl() == nullptr) return;
  const std::lock_guard lock(mutex_);
  dropped_.push_back(std::move(dropped));
}

void SharedContext::destroy_dropped() {
  std::vector<DroppedForward> dropped;
  {
    const std::lock_guard lock(mutex_);
    dropped.swap(dropped_);
  }
  // From the top of a slot to its bottom: a slot is a stack.
  std::ranges::sort(dropped, std::ranges::greater(),
                    [](const DroppedForward& one) { return one.saved.slot_layer(); });
  for (DroppedForward& one : dropped) {
    if (!one.is_expendable) continue;
    try {
      context_.discard(std::move(one.saved), one.stream);
      // NOLINTNEXTLINE(bugprone-empty-catch)
    } catch (const Error&) {  // not the last one: its destruction makes the slot need a reset
    }
  }
}

std::int64_t SharedContext::keep(std::shared_ptr<HeldForward> forward) {
  const std::lock_guard lock(mutex_);
  kept_.emplace(++last_number_, std::move(forward));
  return last_number_;
}

std::shared_ptr<HeldForward> SharedContext::find(std::int64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = kept_.find(number);
  return found == kept_.end() ? nullptr : found->second;
}

void SharedContext::forget(std::int64_t number) {
  std::shared_ptr<HeldForward> forward;  // destroyed without the lock, which its destructor takes
  const std::lock_guard lock(mutex_);
  const auto found = kept_.find(number);
  if (found == kept_.end()) return;
  forward = std::move(found->second);
  kept_.erase(found);
}

SharedContext::InCall::InCall(SharedContext& shared)
    : shared_(shared), is_first_(!shared.in_call_.test_and_set()) {
  if (is_first_) shared_.destroy_dropped();
}

SharedContext::InCall::~InCall() {
  if (is_first_) shared_.in_call_.clear();
}

}  // namespace distmoe::python
