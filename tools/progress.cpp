// SPDX-License-Identifier: Apache-2.0
#include "progress.hpp"

#include <unistd.h>

#include <cstdio>

namespace distmoe::tools {

Progress::Progress(bool is_speaker) : is_enabled_(is_speaker && isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() { clear(); }

void Progress::show(const std::string& stage, std::int64_t done, std::int64_t total) {
  if (!is_enabled_) return;
  const auto now = std::chrono::steady_clock::now();
  if (stage == stage_ && now - last_shown_ < std::chrono::milliseconds(100)) return;
  stage_ = stage;
  last_shown_ = now;
  is_shown_ = true;
  std::fprintf(stderr, "\r\033[K%s", stage.c_str());
  if (total > 0) {
    std::fprintf(stderr, " %lld/%lld", static_cast<long long>(done), static_cast<long long>(total));
  }
  std::fflush(stderr);
}

void Progress::clear() {
  if (!is_shown_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  is_shown_ = false;
}

}  // namespace distmoe::tools
