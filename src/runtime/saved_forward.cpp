// SPDX-License-Identifier: Apache-2.0
#include "distmoe/saved_forward.hpp"

#include <utility>

#include "core/check.hpp"
#include "runtime/context_impl.hpp"
#include "runtime/saved_forward_impl.hpp"

namespace distmoe {
namespace {

/// Nothing where the forward had its backward already.
void abandon(const SavedForwardImpl* impl) noexcept {
  if (impl == nullptr) return;
  if (const auto slots = impl->slots()) slots->abandon(impl->ticket());
}

}  // namespace

SavedForward::SavedForward() noexcept = default;
SavedForward::SavedForward(std::unique_ptr<SavedForwardImpl> impl) noexcept
    : impl_(std::move(impl)) {}
SavedForward::SavedForward(SavedForward&& other) noexcept = default;
SavedForward& SavedForward::operator=(SavedForward&& other) noexcept {
  if (this != &other) {
    abandon(impl_.get());
    impl_ = std::move(other.impl_);
  }
  return *this;
}
SavedForward::~SavedForward() { abandon(impl_.get()); }

bool SavedForward::is_live() const noexcept {
  if (impl_ == nullptr) return false;
  const auto slots = impl_->slots();
  return slots != nullptr && slots->is_live(impl_->ticket());
}

std::int64_t SavedForward::slot() const noexcept {
  return impl_ == nullptr ? -1 : impl_->ticket().slot;
}

std::int64_t SavedForward::slot_layer() const noexcept {
  return impl_ == nullptr ? -1 : impl_->ticket().layer;
}

const SavedForwardImpl& ContextImpl::check_backward(const SavedForward& forward) const {
  const SavedForwardImpl* impl = forward.impl();
  DISTMOE_CHECK(impl != nullptr, kInvalidArgument,
                "a backward needs the saved forward of a saving_routed_experts; this one is of no "
                "forward, or had its backward already");
  DISTMOE_CHECK(impl->slots() == slots_, kInvalidArgument,
                "the saved forward belongs to another context");
  slots_->check_backward(impl->ticket());
  return *impl;
}

}  // namespace distmoe
