// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/thread_pool.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/check.hpp"
#include "core/checked_math.hpp"
#include "core/float_environment.hpp"

namespace distmoe::cpu {

ThreadPool::ThreadPool(int num_threads) {
  try {
    workers_.reserve(static_cast<std::size_t>(std::max(num_threads - 1, 0)));
    for (int worker = 1; worker < num_threads; ++worker) {
      workers_.emplace_back([this, worker] { work(worker); });
    }
  } catch (const std::exception& error) {
    // NOTE: a std::thread that is destroyed before it is joined ends the process.
    stop();
    throw_error(ErrorCode::kOutOfMemory,
                concat("only ", workers_.size(), " of ", num_threads - 1,
                       " worker threads could be started (", error.what(),
                       "); raise the limit of processes (ulimit -u), or ask for fewer than ",
                       num_threads, " threads: ContextOptions::num_threads, DISTMOE_NUM_THREADS"));
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    const std::scoped_lock lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(std::int64_t num_tasks, const Task& task) {
  if (num_tasks <= 0) return;
  // NOTE: a single task runs on the caller alone; waking the others would only cost time.
  const int num_woken = num_tasks > 1 ? static_cast<int>(workers_.size()) : 0;
  {
    const std::scoped_lock lock(mutex_);
    task_ = &task;
    num_tasks_ = num_tasks;
    next_task_ = 0;
    error_ = nullptr;
    running_ = num_woken;
    if (num_woken > 0) ++generation_;
  }
  if (num_woken > 0) start_.notify_all();
  take_tasks(0);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return running_ == 0; });
  task_ = nullptr;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::run_ranges(std::int64_t num_items, std::int64_t grain,
                            const std::function<void(std::int64_t begin, std::int64_t end)>& body) {
  run(ceil_div(num_items, grain),
      [&](std::int64_t task, int) { body(task * grain, std::min(num_items, (task + 1) * grain)); });
}

void ThreadPool::work(int worker) {
  // Not that of whoever made the pool.
  const DefaultFloatEnvironment environment;
  std::uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stop_ || generation_ != seen; });
    if (stop_) return;
    seen = generation_;
    lock.unlock();
    take_tasks(worker);
    lock.lock();
    if (--running_ == 0) done_.notify_all();
  }
}

void ThreadPool::take_tasks(int worker) {
  try {
    for (std::int64_t task = next_task_++; task < num_tasks_; task = next_task_++) {
      (*task_)(task, worker);
    }
  } catch (...) {
    next_task_ = num_tasks_;
    const std::scoped_lock lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

}  // namespace distmoe::cpu
