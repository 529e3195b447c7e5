// SPDX-License-Identifier: Apache-2.0
#include "shared_context.hpp"

namespace distmoe::python {

HeldForward::~HeldForward() {
  if (const auto owner = owner_.lock()) owner->drop(std::move(saved));
}

void SharedContext::drop(SavedForward saved) {
  // One that had its backward, or is of no forward, has nothing to say.
  if (saved.impl() == nullptr) return;
  const std::lock_guard lock(mutex_);
  dropped_.push_back(std::move(saved));
}

void SharedContext::destroy_dropped() {
  std::vector<SavedForward> dropped;
  {
    const std::lock_guard lock(mutex_);
    dropped.swap(dropped_);
  }
}

SharedContext::InCall::InCall(SharedContext& shared)
    : shared_(shared), is_first_(!shared.in_call_.test_and_set()) {
  if (is_first_) shared_.destroy_dropped();
}

SharedContext::InCall::~InCall() {
  if (is_first_) shared_.in_call_.clear();
}

}  // namespace distmoe::python
