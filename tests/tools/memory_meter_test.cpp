// SPDX-License-Identifier: Apache-2.0
// Invariant: the meter reports the highest growth of touched anonymous memory since it was made,
// also after the memory is gone; memory that is merely reserved does not count.
#include "memory_meter.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <chrono>
#include <cstddef>
#include <thread>

namespace distmoe::tools {
namespace {

constexpr std::size_t kBytes = std::size_t{48} << 20;
constexpr std::int64_t kSlack = std::int64_t{4} << 20;

class AnonymousMap {
 public:
  AnonymousMap()
      : data_(static_cast<char*>(
            mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~AnonymousMap() { munmap(data_, kBytes); }
  void touch() {
    for (std::size_t offset = 0; offset < kBytes; offset += 4096) data_[offset] = 1;
  }

 private:
  char* data_;
};

TEST(MemoryMeter, ReportsThePeakAfterTheMemoryIsGone) {
  MemoryMeter meter;
  {
    AnonymousMap map;
    map.touch();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  EXPECT_GT(meter.peak_growth_bytes(), static_cast<std::int64_t>(kBytes) - kSlack);
  EXPECT_LT(meter.peak_growth_bytes(), static_cast<std::int64_t>(kBytes) + kSlack);
}

TEST(MemoryMeter, IgnoresWhatWasThereBeforeAndWhatIsOnlyReserved) {
  AnonymousMap before;
  before.touch();
  MemoryMeter meter;
  AnonymousMap reserved;
  EXPECT_LT(meter.peak_growth_bytes(), kSlack);
}

}  // namespace
}  // namespace distmoe::tools
