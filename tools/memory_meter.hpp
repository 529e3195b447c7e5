// SPDX-License-Identifier: Apache-2.0
//
// How much anonymous memory this process has gained at most. Mapped files do not count: the kernel
// can drop them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace distmoe::tools {

/// Samples resident minus shared pages of /proc/self/statm every millisecond from construction on.
/// Peaks shorter than that can be missed; the kernel's counters are exact to about 64 pages a core.
class MemoryMeter {
 public:
  MemoryMeter();
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  /// Bytes above the baseline at the highest sample so far, this moment included.
  std::int64_t peak_growth_bytes();

 private:
  void sample_until_stopped();
  void sample();

  std::mutex mutex_;
  std::condition_variable stop_requested_;
  bool is_stopping_ = false;
  std::int64_t baseline_bytes_;
  std::int64_t peak_bytes_;
  std::thread sampler_;
};

/// Anonymous bytes of this process now; 0 where /proc does not say.
std::int64_t anonymous_bytes();

}  // namespace distmoe::tools
