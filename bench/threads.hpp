// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace distmoe::bench {

/// Cores that this process may use.
int available_threads();

/// Runs body(0) ... body(num_threads - 1), each on a thread of its own, and joins them. With one
/// thread the caller does it.
void on_threads(int num_threads, const std::function<void(int)>& body);

/// A buffer that `num_threads` threads copy to another with memcpy, each its own share: what one
/// pass over memory costs.
class MemoryCopy {
 public:
  MemoryCopy(std::size_t bytes, int num_threads);
  void run();
  std::size_t bytes() const { return source_.size(); }

 private:
  int num_threads_;
  std::vector<std::byte> source_;
  std::vector<std::byte> destination_;
};

}  // namespace distmoe::bench
