// SPDX-License-Identifier: Apache-2.0
#include "progress.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "core/check.hpp"

namespace distmoe::tools {
namespace {

constexpr std::int64_t kBarWidth = 24;
/// Before that an estimate of what is left says little.
constexpr double kSecondsToEstimate = 2.0;

}  // namespace

std::string progress_line(const std::string& stage, std::int64_t done, std::int64_t total,
                          double seconds) {
  if (total <= 0) return stage;
  const std::int64_t finished = std::clamp<std::int64_t>(done, 0, total);
  const auto filled = static_cast<std::size_t>(finished * kBarWidth / total);
  std::string line = concat(stage, " [", std::string(filled, '#'),
                            std::string(kBarWidth - filled, '.'), "] ", done, "/", total);
  if (seconds >= kSecondsToEstimate && finished > 0) {
    const double left =
        seconds * static_cast<double>(total - finished) / static_cast<double>(finished);
    line += concat(", about ", static_cast<std::int64_t>(std::ceil(left)), " s left");
  }
  return line;
}

Progress::Progress(bool is_speaker) : is_enabled_(is_speaker && isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() { clear(); }

void Progress::show(const std::string& stage, std::int64_t done, std::int64_t total) {
  if (!is_enabled_) return;
  const auto now = std::chrono::steady_clock::now();
  if (stage == stage_ && now - last_shown_ < std::chrono::milliseconds(100)) return;
  if (stage != stage_) stage_begin_ = now;
  stage_ = stage;
  last_shown_ = now;
  is_shown_ = true;
  const double seconds = std::chrono::duration<double>(now - stage_begin_).count();
  std::fprintf(stderr, "\r\033[K%s", progress_line(stage, done, total, seconds).c_str());
  std::fflush(stderr);
}

void Progress::clear() {
  if (!is_shown_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  is_shown_ = false;
}

}  // namespace distmoe::tools
