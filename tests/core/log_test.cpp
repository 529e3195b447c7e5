// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the program decides where the library's lines go; logging never throws, never prints
// past the sink and hands over one line at a time.
#include "core/log.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace distmoe {
namespace {

class LogTest : public ::testing::Test {
 protected:
  void TearDown() override { set_log_sink({}); }
};

using Lines = std::vector<std::pair<LogLevel, std::string>>;

LogSink collect_into(Lines& lines) {
  return [&lines](LogLevel level, std::string_view line) { lines.emplace_back(level, line); };
}

TEST_F(LogTest, SinkReceivesEveryLevelWithItsLine) {
  Lines lines;
  set_log_sink(collect_into(lines));
  log(LogLevel::kDebug, "one");
  log(LogLevel::kError, "two");
  EXPECT_EQ(lines, (Lines{{LogLevel::kDebug, "one"}, {LogLevel::kError, "two"}}));
}

TEST_F(LogTest, ReplacedSinkReceivesNothingMore) {
  Lines first, second;
  set_log_sink(collect_into(first));
  log(LogLevel::kInfo, "to the first");
  set_log_sink(collect_into(second));
  log(LogLevel::kInfo, "to the second");
  EXPECT_EQ(first, (Lines{{LogLevel::kInfo, "to the first"}}));
  EXPECT_EQ(second, (Lines{{LogLevel::kInfo, "to the second"}}));
}

TEST_F(LogTest, EmptySinkSilencesTheLibrary) {
  testing::internal::CaptureStderr();
  testing::internal::CaptureStdout();
  set_log_sink({});
  log(LogLevel::kError, "nobody hears this");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
}

TEST_F(LogTest, ThrowingSinkLosesItsLineAndTheNextIsDelivered) {
  int calls = 0;
  set_log_sink([&](LogLevel, std::string_view) {
    if (++calls == 1) throw std::runtime_error("the disk is full");
  });
  static_assert(noexcept(log(LogLevel::kInfo, "")));
  log(LogLevel::kInfo, "lost");
  log(LogLevel::kInfo, "delivered");
  EXPECT_EQ(calls, 2);
}

TEST_F(LogTest, ThreadsEnterTheSinkOneAtATime) {
  constexpr int kThreads = 4, kLines = 500;
  std::atomic<int> inside = 0;
  std::atomic<bool> overlapped = false;
  int lines = 0;
  set_log_sink([&](LogLevel, std::string_view) {
    if (inside.fetch_add(1) != 0) overlapped = true;
    ++lines;
    std::this_thread::yield();
    inside.fetch_sub(1);
  });
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([] {
      for (int line = 0; line < kLines; ++line) log(LogLevel::kInfo, "line");
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(overlapped);
  EXPECT_EQ(lines, kThreads * kLines);
}

}  // namespace
}  // namespace distmoe
