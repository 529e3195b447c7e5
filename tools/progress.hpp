// SPDX-License-Identifier: Apache-2.0
//
// One line on a terminal that says how far long work is. Silent where stderr is no terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace distmoe::tools {

/// What Progress shows of a stage that began `seconds` ago.
std::string progress_line(const std::string& stage, std::int64_t done, std::int64_t total,
                          double seconds);

class Progress {
 public:
  /// `is_speaker`: one rank of a run speaks.
  explicit Progress(bool is_speaker);
  /// Clears the line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// "<stage> [#####.....] <done>/<total>, about 12 s left", at most ten times a second except for
  /// a new stage; the stage alone where there is no total.
  void show(const std::string& stage, std::int64_t done = 0, std::int64_t total = 0);
  void clear();

 private:
  bool is_enabled_;
  bool is_shown_ = false;
  std::string stage_;
  std::chrono::steady_clock::time_point stage_begin_;
  std::chrono::steady_clock::time_point last_shown_;
};

}  // namespace distmoe::tools
