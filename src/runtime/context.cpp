// SPDX-License-Identifier: Apache-2.0
#include "distmoe/context.hpp"

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "comm/agreement.hpp"
#include "core/check.hpp"
#include "core/checked_math.hpp"
#include "core/current_error.hpp"
#include "core/float_environment.hpp"
#include "core/log.hpp"
#include "distmoe/saved_forward.hpp"
#include "plan/capacity_rows.hpp"
#include "plan/expert_partition.hpp"
#include "runtime/context_impl.hpp"
#include "runtime/handshake.hpp"
#include "runtime/imbalance.hpp"
#include "runtime/saved_forward_impl.hpp"

namespace distmoe {
namespace {

/// What the peers find by themselves.
bool is_found_by_peers(ErrorCode code) {
  return code == ErrorCode::kPeerMismatch || code == ErrorCode::kPeerLost;
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
                         std::shared_ptr<SlotLedger> slots,
                         std::shared_ptr<Communicator> communicator, Communicator::Timeout timeout,
                         int rank, int size, Device device)
    : config_(config),
      plan_(std::move(plan)),
      communicator_(std::move(communicator)),
      backend_(std::move(backend)),
      rank_(rank),
      size_(size),
      device_(device),
      timeout_(timeout),
      process_(getpid()),
      slots_(std::move(slots)) {}

ContextImpl::~ContextImpl() { leave_to_parent(); }

bool ContextImpl::is_of_this_process() const { return process_ == getpid(); }

void ContextImpl::leave_to_parent() noexcept {
  // NOTE: the threads that would be waited for are the parent's alone; what the child has of the
  // memory goes with the child.
  if (!is_of_this_process()) static_cast<void>(backend_.release());
}

void ContextImpl::check_process() const {
  DISTMOE_CHECK(is_of_this_process(), kUnsupported, "the context belongs to process ", process_,
                ", this is process ", getpid(),
                ": a fork copies no threads, and peers know one process of a rank; make contexts "
                "in the process that calls them");
}

void ContextImpl::check_usable() const {
  check_process();
  check_open();
}

void ContextImpl::check_open() const {
  DISTMOE_CHECK(backend_ != nullptr, kClosed, "the context is closed");
  DISTMOE_CHECK(fault_.empty(), kClosed, "an earlier call left the context unusable (", fault_,
                "); close it and create another");
}

void ContextImpl::use(const std::function<void(Backend&)>& body) {
  only_errors("a request to a context", [&] {
    const DefaultFloatEnvironment environment;
    check_process();
    const InCall in_call(in_call_);
    check_open();
    try {
      body(*backend_);
    } catch (const Error& error) {
      // Found by check(), or by waiting for the device.
      if (error.code() == ErrorCode::kPeerLost || error.code() == ErrorCode::kDeviceFault) {
        leave_the_others(error);
      }
      throw;
    }
  });
}

void ContextImpl::run_call(const std::function<void(Backend&, std::int64_t)>& call) {
  run_together([&](Backend& backend) {
    ++num_calls_;
    call(backend, num_calls_);
  });
}

void ContextImpl::agree(const std::optional<Error>& failure) {
  run_together([&](Backend&) {
    std::optional<Error> mine = failure;
    if (mine) {
      mine.emplace(mine->code(),
                   concat("rank ", rank_, ", after call ", num_calls_, ": ", mine->what()));
    }
    const Refusal own = to_refusal(mine);
    std::vector<Refusal> refusals(static_cast<std::size_t>(size_), own);
    if (size_ > 1) all_gather(*communicator_, own, std::span(refusals), timeout_);
    throw_if_refused(refusals, rank_, mine, concat("to go on after call ", num_calls_));
  });
}

void ContextImpl::run_together(const std::function<void(Backend&)>& body) {
  only_errors("a call", [&] {
    const DefaultFloatEnvironment environment;
    check_process();
    const InCall in_call(in_call_);
    check_open();
    try {
      body(*backend_);
    } catch (const AgreedError& error) {
      throw Error(error);
    } catch (...) {
      const Error error = current_error(concat("rank ", rank_, ", call ", num_calls_));
      leave_the_others(error);
      throw Error(error);
    }
  });
}

void ContextImpl::leave_the_others(const Error& error) {
  fault_ = error.what();
  backend_->leave();
  if (communicator_ == nullptr || is_found_by_peers(error.code())) return;
  communicator_->abort(concat(to_string(error.code()), ": ", error.what()));
}

void ContextImpl::check() {
  use([](Backend& backend) { backend.check(); });
}

void ContextImpl::note_call(std::int64_t index, std::int64_t num_tokens,
                            const std::optional<SlotTicket>& ticket) {
  last_call_ = {};
  last_call_.call = index;
  last_call_.tokens = num_tokens;
  if (!ticket) return;
  last_call_.slot = ticket->slot;
  last_call_.slot_layer = ticket->layer;
}

CallStatistics ContextImpl::last_call() {
  CallStatistics statistics;
  use([&](Backend& backend) {
    statistics = last_call_;
    if (statistics.call == 0) return;
    const RoutingLoad load = backend.load();
    if (load.rows_per_rank.empty()) return;
    statistics.is_recomputed = load.is_recomputed;
    statistics.rows_per_rank.assign(load.rows_per_rank.begin(), load.rows_per_rank.end());
    statistics.rows_per_expert.assign(load.rows_per_expert.begin(), load.rows_per_expert.end());
    statistics.rank_imbalance = imbalance_of(load.rows_per_rank).value_or(0.0);
    statistics.expert_imbalance = imbalance_of(load.rows_per_expert).value_or(0.0);
    statistics.device_scratch_bytes = std::min(load.scratch_bytes, plan_.device_scratch_bytes);
    statistics.host_scratch_bytes = load.scratch_bytes - statistics.device_scratch_bytes;
  });
  return statistics;
}

void ContextImpl::select_slot(std::int64_t slot, std::int64_t num_layers) {
  // NOTE: by reference, here and below: a function of more than two words would take memory.
  const auto select = [&](Backend&) { slots_->select(slot, num_layers); };
  use(std::ref(select));
}

std::int64_t ContextImpl::selected_slot() const { return slots_ ? slots_->selected_slot() : 0; }

void ContextImpl::discard(const SavedForward& forward, void* stream) {
  const auto give_back = [&](Backend& backend) {
    const SlotTicket& ticket = check_backward(forward).ticket();
    backend.discard(ticket, stream);
    slots_->pop(ticket);
    forward.impl()->finish();
  };
  use(std::ref(give_back));
}

void ContextImpl::reset() {
  use([&](Backend& backend) {
    slots_->reset();
    backend.reset_slots();
  });
}

RegionPeaks ContextImpl::region_peaks() {
  RegionPeaks peaks;
  use([&](Backend& backend) { peaks = backend.region_peaks(); });
  return peaks;
}

void ContextImpl::close() {
  leave_to_parent();
  if (!backend_) return;
  const InCall in_call(in_call_);
  backend_.reset();
  slots_.reset();
}

Context Context::create(const Config& config, std::shared_ptr<Communicator> communicator,
                        const ContextOptions& options) {
  return Context(create_context(config, communicator, options));
}

Context Context::create(const Config& config, const ContextOptions& options) {
  return create(config, nullptr, options);
}

Context::Context(std::unique_ptr<ContextImpl> impl) : impl_(std::move(impl)) {}
Context::Context(Context&&) noexcept = default;
Context& Context::operator=(Context&&) noexcept = default;
Context::~Context() = default;

const Config& Context::config() const { return impl().config(); }
const MemoryPlan& Context::memory_plan() const { return impl().plan(); }
int Context::rank() const { return impl().rank(); }
int Context::size() const { return impl().size(); }

std::int64_t Context::first_expert() const {
  return distmoe::first_expert(impl().config().num_experts, impl().size(), impl().rank());
}

std::int64_t Context::num_local_experts() const {
  return distmoe::num_local_experts(impl().config().num_experts, impl().size(), impl().rank());
}

CallStatistics Context::last_call() const { return impl().last_call(); }
// NOLINTBEGIN(readability-make-member-function-const): they change what impl_ points to
void Context::check() { impl().check(); }
void Context::select_activation_slot(std::int64_t slot, std::int64_t num_moe_layers) {
  impl().select_slot(slot, num_moe_layers);
}
std::int64_t Context::selected_activation_slot() const { return impl().selected_slot(); }
void Context::discard(SavedForward&& saved, void* stream) {
  impl().discard(saved, stream);
  saved = {};
}
void Context::reset() { impl().reset(); }
// NOLINTEND(readability-make-member-function-const)
RegionPeaks Context::region_peaks() const { return impl().region_peaks(); }
std::int64_t Context::allocated_bytes() const { return impl().allocated_bytes(); }
void Context::close() {
  if (impl_) impl_->close();
}
bool Context::is_closed() const noexcept { return !impl_ || impl_->is_closed(); }
ContextImpl& Context::impl() const {
  DISTMOE_CHECK(impl_ != nullptr, kClosed, "the context was moved from");
  return *impl_;
}

}  // namespace distmoe
