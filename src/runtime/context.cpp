// SPDX-License-Identifier: Apache-2.0
#include "distmoe/context.hpp"

#include <utility>

#include "core/check.hpp"
#include "core/log.hpp"
#include "plan/expert_partition.hpp"
#include "runtime/context_impl.hpp"
#include "runtime/handshake.hpp"

namespace distmoe {
namespace {

/// Ranks are no longer known to be in step after these.
bool leaves_ranks_out_of_step(ErrorCode code) {
  return code == ErrorCode::kPeerLost || code == ErrorCode::kPeerMismatch ||
         code == ErrorCode::kDeviceFault || code == ErrorCode::kInternal;
}

class InCall {
 public:
  explicit InCall(std::atomic_flag& flag) : flag_(flag) {
    DISTMOE_CHECK(
        !flag_.test_and_set(), kInvalidArgument,
        "a call on this context began before the previous one ended; a context serves one "
        "call at a time");
  }
  ~InCall() { flag_.clear(); }
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

 private:
  std::atomic_flag& flag_;
};

}  // namespace

ContextImpl::ContextImpl(const Config& config, MemoryPlan plan, std::unique_ptr<Backend> backend,
                         int rank, int size, Device device)
    : config_(config),
      plan_(std::move(plan)),
      backend_(std::move(backend)),
      rank_(rank),
      size_(size),
      device_(device),
      slots_(std::make_shared<SlotLedger>(plan_.num_slots,
                                          config_.max_moe_layers_per_activation_slot)) {}

void ContextImpl::guard(const std::function<void(Backend&)>& body) {
  const InCall in_call(in_call_);
  DISTMOE_CHECK(backend_ != nullptr, kClosed, "the context is closed");
  DISTMOE_CHECK(fault_.empty(), kClosed, "an earlier call left the context unusable (", fault_,
                "); close it and create another");
  try {
    body(*backend_);
  } catch (const Error& error) {
    if (leaves_ranks_out_of_step(error.code())) fault_ = error.what();
    throw;
  } catch (const std::exception& error) {
    fault_ = error.what();
    throw;
  }
}

void ContextImpl::run_call(const std::function<void(Backend&, std::int64_t)>& call) {
  guard([&](Backend& backend) { call(backend, ++num_calls_); });
}

void ContextImpl::check() {
  guard([](Backend& backend) { backend.check(); });
}

void ContextImpl::note_routed(const ForwardCall& call) {
  last_call_ = {};
  last_call_.call = call.index;
  last_call_.tokens = call.num_tokens;
  if (!call.ticket) return;
  last_call_.slot = call.ticket->slot;
  last_call_.slot_layer = call.ticket->layer;
}

CallStatistics ContextImpl::last_call() {
  if (last_call_.call == 0 || backend_ == nullptr) return {};
  CallStatistics statistics = last_call_;
  const RoutingLoad load = backend_->load();
  statistics.is_recomputed = load.is_recomputed;
  statistics.rows_per_rank.assign(load.rows_per_rank.begin(), load.rows_per_rank.end());
  statistics.rows_per_expert.assign(load.rows_per_expert.begin(), load.rows_per_expert.end());
  return statistics;
}

void ContextImpl::select_slot(std::int64_t slot, std::int64_t num_layers) {
  guard([&](Backend&) { slots_->select(slot, num_layers); });
}

std::int64_t ContextImpl::selected_slot() const { return slots_ ? slots_->selected_slot() : 0; }

void ContextImpl::reset() {
  guard([&](Backend& backend) {
    slots_->reset();
    backend.reset_slots();
  });
}

RegionPeaks ContextImpl::region_peaks() {
  return backend_ == nullptr ? RegionPeaks{} : backend_->region_peaks();
}

void ContextImpl::close() {
  const InCall in_call(in_call_);
  backend_.reset();
  slots_.reset();
}

Context Context::create(const Config& config, std::shared_ptr<Communicator> communicator,
                        const ContextOptions& options) {
  return Context(create_context(config, std::move(communicator), options));
}

Context Context::create(const Config& config, const ContextOptions& options) {
  return create(config, nullptr, options);
}

Context::Context(std::unique_ptr<ContextImpl> impl) : impl_(std::move(impl)) {}
Context::Context(Context&&) noexcept = default;
Context& Context::operator=(Context&&) noexcept = default;
Context::~Context() = default;

const Config& Context::config() const { return impl_->config(); }
const MemoryPlan& Context::memory_plan() const { return impl_->plan(); }
int Context::rank() const { return impl_->rank(); }
int Context::size() const { return impl_->size(); }

std::int64_t Context::first_expert() const {
  return distmoe::first_expert(impl_->config().num_experts, impl_->size(), impl_->rank());
}

std::int64_t Context::num_local_experts() const {
  return distmoe::num_local_experts(impl_->config().num_experts, impl_->size(), impl_->rank());
}

CallStatistics Context::last_call() const { return impl_->last_call(); }
void Context::check() { impl_->check(); }
void Context::select_activation_slot(std::int64_t slot, std::int64_t num_moe_layers) {
  impl_->select_slot(slot, num_moe_layers);
}
std::int64_t Context::selected_activation_slot() const { return impl_->selected_slot(); }
void Context::reset() { impl_->reset(); }
RegionPeaks Context::region_peaks() const { return impl_->region_peaks(); }
std::int64_t Context::allocated_bytes() const { return impl_->allocated_bytes(); }
void Context::close() { impl_->close(); }
bool Context::is_closed() const noexcept { return !impl_ || impl_->is_closed(); }
ContextImpl& Context::impl() { return *impl_; }

}  // namespace distmoe
