// SPDX-License-Identifier: Apache-2.0
#include "core/log.hpp"

#include <cstdio>
#include <mutex>
#include <utility>

#include "core/environment.hpp"

namespace distmoe {
namespace {

void write_to_stderr(LogLevel level, std::string_view line) {
  static constexpr const char* kNames[] = {"debug", "info", "warning", "error"};
  if (level < unreported_environment().log_level) return;
  std::fprintf(stderr, "distmoe %s: %.*s\n", kNames[static_cast<int>(level)],
               static_cast<int>(line.size()), line.data());
}

struct SinkHolder {
  std::mutex mutex;
  LogSink sink = write_to_stderr;
};

// Leaked on purpose: a thread may still log while static objects are destroyed.
SinkHolder& holder() {
  static auto* instance = new SinkHolder;
  return *instance;
}

}  // namespace

void set_log_sink(LogSink sink) {
  const std::scoped_lock lock(holder().mutex);
  holder().sink = std::move(sink);
}

void log(LogLevel level, std::string_view line) noexcept {
  try {
    // What is wrong with the environment is said first. Before the lock: it is logged, too.
    environment();
    const std::scoped_lock lock(holder().mutex);
    if (holder().sink) holder().sink(level, line);
  } catch (...) {  // NOLINT(bugprone-empty-catch): logging must not change what the caller does
  }
}

}  // namespace distmoe
