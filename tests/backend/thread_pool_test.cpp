// SPDX-License-Identifier: Apache-2.0
//
// Invariant: every task runs exactly once before run() returns, on workers with numbers of their
// own; an exception reaches the caller and leaves the pool usable. A pool whose threads cannot all
// be started is an error with both numbers and leaves none behind.
#include "backend/cpu/thread_pool.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <system_error>

#include "distmoe/error.hpp"

namespace distmoe::cpu {
namespace {

constexpr int kNothingToSee = 77;

bool can_start_a_thread() {
  try {
    std::thread([] {}).join();
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

void limit_processes(rlim_t processes) {
  rlimit limit{};
  getrlimit(RLIMIT_NPROC, &limit);
  limit.rlim_cur = std::min(processes, limit.rlim_max);
  setrlimit(RLIMIT_NPROC, &limit);
}

/// From here on this process can start a few threads only; false where the system won't have it.
/// Root is not bound by the limit and becomes a user of its own first.
bool allow_few_threads() {
  constexpr uid_t kNobodyElse = 54321;
  if (geteuid() == 0 && setresuid(kNobodyElse, kNobodyElse, kNobodyElse) != 0) return false;
  limit_processes(1);
  if (can_start_a_thread()) return false;
  rlim_t processes = 1;
  do {
    limit_processes(++processes);
  } while (!can_start_a_thread() && processes < 100'000);
  limit_processes(processes + 1);
  return true;
}

/// Makes a pool of more threads than it may have, in a child process, and says what came of it.
[[noreturn]] void start_too_many_and_leave() {
  if (!allow_few_threads()) std::_Exit(kNothingToSee);
  bool is_right = false;
  try {
    const ThreadPool pool(1024);
    std::fputs("all were started", stderr);
  } catch (const Error& error) {
    std::fputs(error.what(), stderr);
    limit_processes(RLIM_INFINITY);
    ThreadPool next(3);
    std::atomic<int> count{0};
    next.run(10, [&](std::int64_t, int) { ++count; });
    is_right = error.code() == ErrorCode::kOutOfMemory && count == 10;
  }
  std::_Exit(is_right ? 0 : 1);
}

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

TEST(ThreadPoolDeathTest, ThreadsThatCannotBeStartedAreAnErrorWithBothNumbers) {
  bool is_provoked = true;
  const auto has_left_well = [&](int status) {
    is_provoked = !WIFEXITED(status) || WEXITSTATUS(status) != kNothingToSee;
    return !is_provoked || (WIFEXITED(status) && WEXITSTATUS(status) == 0);
  };
  EXPECT_EXIT(start_too_many_and_leave(), has_left_well,
              "^(only [1-9][0-9]* of 1023 worker threads.*)?$");
  if (!is_provoked) GTEST_SKIP() << "RLIMIT_NPROC does not bind this process";
}

}  // namespace
}  // namespace distmoe::cpu
