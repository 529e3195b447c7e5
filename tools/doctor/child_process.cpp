// SPDX-License-Identifier: Apache-2.0
#include "doctor/child_process.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <thread>

#include "core/check.hpp"

namespace distmoe::tools {
namespace {

constexpr std::chrono::seconds kTimeToEnd{3};

std::vector<char*> pointers_of(const std::vector<std::string>& words) {
  std::vector<char*> pointers;
  pointers.reserve(words.size() + 1);
  for (const std::string& word : words) pointers.push_back(const_cast<char*>(word.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

/// This process's variables, those in `added` replaced.
std::vector<std::string> merged_environment(const std::vector<std::string>& added) {
  std::vector<std::string> all = added;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::string name = text.substr(0, text.find('=') + 1);
    const bool is_replaced = std::ranges::any_of(
        added, [&](const std::string& other) { return other.starts_with(name); });
    if (!is_replaced) all.push_back(text);
  }
  return all;
}

}  // namespace

ChildProcess::ChildProcess(const std::vector<std::string>& words,
                           const std::vector<std::string>& environment)
    : output_(memfd_create("distmoe-child", MFD_CLOEXEC)) {
  DISTMOE_CHECK(output_ >= 0, kIo, "no memory file for the output of ", words[0], ": ",
                std::strerror(errno));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, output_, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output_, STDERR_FILENO);
  const std::vector<std::string> variables = merged_environment(environment);
  const int problem = posix_spawnp(&pid_, words[0].c_str(), &actions, nullptr,
                                   pointers_of(words).data(), pointers_of(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  if (problem != 0) {
    close(output_);
    throw_error(ErrorCode::kIo, concat("cannot start ", words[0], ": ", std::strerror(problem)));
  }
}

ChildProcess::~ChildProcess() {
  end();
  close(output_);
}

bool ChildProcess::has_ended() {
  if (pid_ >= 0 && waitpid(pid_, &status_, WNOHANG) == pid_) pid_ = -1;
  return pid_ < 0;
}

bool ChildProcess::wait_until(std::chrono::steady_clock::time_point deadline) {
  while (!has_ended()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

void ChildProcess::end() {
  if (has_ended()) return;
  kill(pid_, SIGTERM);
  if (wait_until(std::chrono::steady_clock::now() + kTimeToEnd)) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, &status_, 0);
  pid_ = -1;
}

ChildResult ChildProcess::wait(std::chrono::steady_clock::time_point deadline) {
  ChildResult result;
  result.is_late = !wait_until(deadline);
  end();
  result.exit_code = WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
  const off_t bytes = lseek(output_, 0, SEEK_END);
  result.output.resize(bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
  const ssize_t count = pread(output_, result.output.data(), result.output.size(), 0);
  result.output.resize(count > 0 ? static_cast<std::size_t>(count) : 0);
  return result;
}

}  // namespace distmoe::tools
