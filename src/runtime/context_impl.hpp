// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "backend/backend.hpp"
#include "distmoe/context.hpp"

namespace distmoe {

/// The state of a Context.
class ContextImpl {
 public:
  ContextImpl(const Config& config, MemoryPlan plan, std::unique_ptr<Backend> backend, int rank,
              int size, BackendKind backend_kind);

  const Config& config() const { return config_; }
  const MemoryPlan& plan() const { return plan_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  BackendKind backend_kind() const { return backend_kind_; }
  const CallStatistics& last_call() const { return last_call_; }
  std::int64_t allocated_bytes() const { return backend_ ? backend_->allocated_bytes() : 0; }

  /// Runs one collective call: refuses a closed or faulted context and overlapping calls, numbers
  /// the call, and after an error that leaves ranks out of step lets nothing but close() through.
  void run_call(const std::function<void(Backend&, std::int64_t call_index)>& call);
  void record_load(std::int64_t call_index, std::int64_t num_tokens);

  void close();
  bool is_closed() const { return !backend_; }

 private:
  Config config_;
  MemoryPlan plan_;
  std::unique_ptr<Backend> backend_;  ///< null after close()
  int rank_;
  int size_;
  BackendKind backend_kind_;
  std::int64_t num_calls_ = 0;
  std::atomic_flag in_call_;
  std::string fault_;  ///< why later calls are refused; empty while all is well
  CallStatistics last_call_;
};

}  // namespace distmoe
