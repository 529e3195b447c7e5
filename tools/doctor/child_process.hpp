// SPDX-License-Identifier: Apache-2.0
//
// A program that is started, given some time, and listened to.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace distmoe::tools {

struct ChildResult {
  int exit_code = -1;  ///< 128 + signal where one ended it
  bool is_late = false;
  std::string output;  ///< stdout and stderr, as they came
};

class ChildProcess {
 public:
  /// `environment` holds NAME=value in addition to this process's. stdin is empty. Throws io where
  /// it cannot be started.
  ChildProcess(const std::vector<std::string>& words, const std::vector<std::string>& environment);
  /// Ends it where it still runs.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  /// Ends it at `deadline`: launchers get a moment to end what they started.
  ChildResult wait(std::chrono::steady_clock::time_point deadline);

 private:
  bool has_ended();
  bool wait_until(std::chrono::steady_clock::time_point deadline);
  void end();

  pid_t pid_ = -1;
  int output_ = -1;
  int status_ = 0;
};

}  // namespace distmoe::tools
