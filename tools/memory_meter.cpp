// SPDX-License-Identifier: Apache-2.0
#include "memory_meter.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace distmoe::tools {

std::int64_t anonymous_bytes() {
  std::FILE* file = std::fopen("/proc/self/statm", "re");
  if (file == nullptr) return 0;
  long long resident = 0;
  long long shared = 0;
  const bool is_read = std::fscanf(file, "%*d %lld %lld", &resident, &shared) == 2;
  std::fclose(file);
  return is_read ? (resident - shared) * sysconf(_SC_PAGESIZE) : 0;
}

MemoryMeter::MemoryMeter()
    : baseline_bytes_(anonymous_bytes()),
      peak_bytes_(baseline_bytes_),
      sampler_([this] { sample_until_stopped(); }) {}

MemoryMeter::~MemoryMeter() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  stop_requested_.notify_one();
  sampler_.join();
}

std::int64_t MemoryMeter::peak_growth_bytes() {
  const std::lock_guard lock(mutex_);
  sample();
  return peak_bytes_ - baseline_bytes_;
}

void MemoryMeter::sample_until_stopped() {
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    sample();
    stop_requested_.wait_for(lock, std::chrono::milliseconds(1));
  }
}

void MemoryMeter::sample() { peak_bytes_ = std::max(peak_bytes_, anonymous_bytes()); }

}  // namespace distmoe::tools
