// SPDX-License-Identifier: Apache-2.0
//
// Invariant: every task runs exactly once before run() returns, on workers with numbers of their
// own; an exception reaches the caller and leaves the pool usable.
#include "backend/cpu/thread_pool.hpp"

#include <gtest/gtest.h>

#include <stdexcept>

namespace distmoe::cpu {
namespace {

TEST(ThreadPool, RunsEveryTaskOnceInEveryRound) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (std::int64_t tasks = 0; tasks <= 40; ++tasks) {
      std::vector<std::atomic<int>> counts(static_cast<std::size_t>(tasks));
      pool.run(tasks, [&](std::int64_t task, int worker) {
        EXPECT_GE(worker, 0);
        EXPECT_LT(worker, threads);
        ++counts[static_cast<std::size_t>(task)];
      });
      for (const auto& count : counts) ASSERT_EQ(count, 1);
    }
  }
}

TEST(ThreadPool, NoTwoTasksShareAWorkerAtATime) {
  ThreadPool pool(4);
  std::vector<std::atomic<int>> in_use(4);
  pool.run(2000, [&](std::int64_t, int worker) {
    EXPECT_EQ(in_use[static_cast<std::size_t>(worker)]++, 0);
    --in_use[static_cast<std::size_t>(worker)];
  });
}

TEST(ThreadPool, RangesCoverAllItemsWithoutOverlap) {
  ThreadPool pool(3);
  for (const std::int64_t items : {0, 1, 7, 8, 9, 100}) {
    std::vector<std::atomic<int>> counts(static_cast<std::size_t>(items));
    pool.run_ranges(items, 8, [&](std::int64_t begin, std::int64_t end) {
      EXPECT_LE(end - begin, 8);
      for (std::int64_t i = begin; i < end; ++i) ++counts[static_cast<std::size_t>(i)];
    });
    for (const auto& count : counts) ASSERT_EQ(count, 1);
  }
}

TEST(ThreadPool, AnExceptionReachesTheCallerAndThePoolGoesOn) {
  ThreadPool pool(3);
  for (int round = 0; round < 50; ++round) {
    EXPECT_THROW(pool.run(20,
                          [&](std::int64_t task, int) {
                            if (task == round % 20) throw std::runtime_error("task");
                          }),
                 std::runtime_error);
    std::atomic<int> count{0};
    pool.run(10, [&](std::int64_t, int) { ++count; });
    EXPECT_EQ(count, 10);
  }
}

}  // namespace
}  // namespace distmoe::cpu
