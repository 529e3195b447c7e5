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
              int size, Device device);

  const Config& config() const { return config_; }
  const MemoryPlan& plan() const { return plan_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  Device device() const { return device_; }
  std::int64_t allocated_bytes() const { return backend_ ? backend_->allocated_bytes() : 0; }

  /// Runs one collective call: refuses a closed or faulted context and overlapping calls, numbers
  /// the call, and after an error that leaves ranks out of step lets nothing but close() through.
  void run_call(const std::function<void(Backend&, std::int64_t call_index)>& call);
  void note_routed(std::int64_t call_index, std::int64_t num_tokens);
  CallStatistics last_call();
  void check();

  void close();
  bool is_closed() const { return !backend_; }

 private:
  void guard(const std::function<void(Backend&)>& body);

  Config config_;
  MemoryPlan plan_;
  std::unique_ptr<Backend> backend_;  ///< null after close()
  int rank_;
  int size_;
  Device device_;
  std::int64_t num_calls_ = 0;
  std::atomic_flag in_call_;
  std::string fault_;  ///< why later calls are refused; empty while all is well
  std::int64_t last_routed_call_ = 0;
  std::int64_t last_num_tokens_ = 0;
};

}  // namespace distmoe
