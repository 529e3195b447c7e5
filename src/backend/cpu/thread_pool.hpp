// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace distmoe::cpu {

/// The worker threads of one rank. The thread that calls run() is worker 0. Which worker gets which
/// task depends on timing; no result may depend on it.
class ThreadPool {
 public:
  using Task = std::function<void(std::int64_t task, int worker)>;

  /// Throws out_of_memory where the system starts fewer threads; none is left behind.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const noexcept { return static_cast<int>(workers_.size()) + 1; }

  /// Runs task(i, worker) for i in [0, num_tasks) and returns when all are done. The first
  /// exception of a task is rethrown; tasks that had not started by then are skipped.
  void run(std::int64_t num_tasks, const Task& task);

  /// Cuts [0, num_items) into ranges of `grain` items and runs body(begin, end) on each.
  void run_ranges(std::int64_t num_items, std::int64_t grain,
                  const std::function<void(std::int64_t begin, std::int64_t end)>& body);

 private:
  void stop();
  void work(int worker);
  void take_tasks(int worker);

  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  std::uint64_t generation_ = 0;
  int running_ = 0;
  bool stop_ = false;
  const Task* task_ = nullptr;
  std::int64_t num_tasks_ = 0;
  std::atomic<std::int64_t> next_task_{0};
  std::exception_ptr error_;
  std::vector<std::thread> workers_;
};

}  // namespace distmoe::cpu
