// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "backend/backend.hpp"
#include "distmoe/context.hpp"
#include "distmoe/saved_forward.hpp"
#include "plan/slot_ledger.hpp"

namespace distmoe {

/// The state of a Context.
class ContextImpl {
 public:
  /// `communicator` is null for a single rank.
  ContextImpl(const Config& config, MemoryPlan plan, std::unique_ptr<Backend> backend,
              std::shared_ptr<SlotLedger> slots, std::shared_ptr<Communicator> communicator,
              Communicator::Timeout timeout, int rank, int size, Device device);

  const Config& config() const { return config_; }
  const MemoryPlan& plan() const { return plan_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  Device device() const { return device_; }
  Backend* backend() const { return backend_.get(); }  ///< null after close()
  std::int64_t allocated_bytes() const { return backend_ ? backend_->allocated_bytes() : 0; }

  ~ContextImpl();
  ContextImpl(const ContextImpl&) = delete;
  ContextImpl& operator=(const ContextImpl&) = delete;

  /// Runs one collective call: refuses a closed or faulted context and overlapping calls, numbers
  /// the call, and makes every exception an Error. After any but an AgreedError it tells the others
  /// that this rank leaves, and lets nothing but close() through.
  void run_call(const std::function<void(Backend&, std::int64_t call_index)>& call);
  /// Collective: throws on every rank where any has a `failure`, which it met after its last call.
  void agree(const std::optional<Error>& failure);
  /// Refuses a context that was closed, left unusable by a fault or made by another process.
  void check_usable() const;
  /// Of a call, forward or backward, that was routed.
  void note_call(std::int64_t index, std::int64_t num_tokens,
                 const std::optional<SlotTicket>& ticket);
  CallStatistics last_call();
  void check();

  /// Which forwards are live in which slot; null after close().
  const std::shared_ptr<SlotLedger>& slots() const { return slots_; }
  void select_slot(std::int64_t slot, std::int64_t num_layers);
  std::int64_t selected_slot() const;
  void discard(const SavedForward& forward, void* stream);
  void reset();
  RegionPeaks region_peaks();
  /// The state of a saved forward whose backward may come now. Throws invalid_argument where it is
  /// not the last live one of its slot.
  const SavedForwardImpl& check_backward(const SavedForward& forward) const;

  void close();
  bool is_closed() const { return !backend_; }

 private:
  /// Runs what ranks do together. After any exception but an AgreedError the others hear that this
  /// rank leaves, and nothing but close() gets through.
  void run_together(const std::function<void(Backend&)>& body);
  bool is_of_this_process() const;
  void check_process() const;
  void check_open() const;
  void leave_to_parent() noexcept;  ///< in a forked child, where nothing can be freed
  /// What concerns this rank alone, between calls.
  void use(const std::function<void(Backend&)>& body);
  void leave_the_others(const Error& error);

  Config config_;
  MemoryPlan plan_;
  std::shared_ptr<Communicator> communicator_;
  std::unique_ptr<Backend> backend_;  ///< null after close()
  int rank_;
  int size_;
  Device device_;
  Communicator::Timeout timeout_;
  std::int64_t process_;  ///< that made the context
  std::int64_t num_calls_ = 0;
  std::atomic_flag in_call_;
  std::string fault_;         ///< why later calls are refused; empty while all is well
  CallStatistics last_call_;  ///< what the host knows of it
  std::shared_ptr<SlotLedger> slots_;
};

}  // namespace distmoe
