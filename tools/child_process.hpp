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

enum class ChildInput { kEmpty, kPipe };

class ChildProcess {
 public:
  /// `environment` holds NAME=value in addition to this process's. Throws io where it cannot be
  /// started.
  ChildProcess(const std::vector<std::string>& words, const std::vector<std::string>& environment,
               ChildInput input = ChildInput::kEmpty);
  /// Ends it where it still runs.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  /// To its stdin, a pipe. Throws io where it does not read any more, or not by `deadline`.
  void write_line(const std::string& line, std::chrono::steady_clock::time_point deadline);
  /// The next line that it writes and that begins with `start`; others are passed over. Throws io,
  /// with the last words of the program, where there is none by `deadline` or it ends before.
  std::string read_line(const std::string& start, std::chrono::steady_clock::time_point deadline);

  /// Ends it at `deadline`: launchers get a moment to end what they started.
  ChildResult wait(std::chrono::steady_clock::time_point deadline);

 private:
  bool has_ended();
  bool wait_until(std::chrono::steady_clock::time_point deadline);
  void end();
  void close_files();
  std::string output_after(std::size_t begin) const;

  std::string program_;
  pid_t pid_ = -1;
  int input_ = -1;  ///< the end that is written
  std::size_t num_read_ = 0;
  int output_ = -1;
  int status_ = 0;
};

}  // namespace distmoe::tools
