// SPDX-License-Identifier: Apache-2.0
//
// How a rank waits between two polls: busy while an answer is likely at once, then giving way to
// other ranks on the same core, then asleep.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace distmoe::mpi {

class Backoff {
 public:
  void reset() { *this = Backoff(); }

  void pause() {
    ++polls_;
    if (polls_ <= kBusyPolls) return;
    if (polls_ <= kBusyPolls + kYieldPolls) {
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(2 * sleep_, kLongestSleep);
  }

 private:
  static constexpr int kBusyPolls = 64;
  static constexpr int kYieldPolls = 1000;
  static constexpr std::chrono::microseconds kLongestSleep{1000};

  int polls_ = 0;
  std::chrono::microseconds sleep_{50};
};

}  // namespace distmoe::mpi
