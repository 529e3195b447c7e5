// SPDX-License-Identifier: Apache-2.0
#include "threads.hpp"

#include <cstring>
#include <thread>

#include "core/checked_math.hpp"
#include "runtime/cores.hpp"

namespace distmoe::bench {

int available_threads() { return cores_of_this_process().num_cores; }

void on_threads(int num_threads, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int index = 1; index < num_threads; ++index)
    threads.emplace_back([&body, index] { body(index); });
  body(0);
  for (std::thread& thread : threads) thread.join();
}

MemoryCopy::MemoryCopy(std::size_t bytes, int num_threads)
    : num_threads_(num_threads), source_(bytes, std::byte{1}), destination_(bytes, std::byte{2}) {}

void MemoryCopy::run() {
  const std::size_t share = source_.size() / static_cast<std::size_t>(num_threads_);
  on_threads(num_threads_, [&](int index) {
    const std::size_t begin = share * static_cast<std::size_t>(index);
    std::memcpy(destination_.data() + begin, source_.data() + begin, share);
  });
}

}  // namespace distmoe::bench
