// SPDX-License-Identifier: Apache-2.0
#include "child_process.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <thread>
#include <utility>

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
                           const std::vector<std::string>& environment, ChildInput input)
    : program_(words[0]), output_(memfd_create("distmoe-child", MFD_CLOEXEC)) {
  std::array<int, 2> pipe{-1, -1};
  const bool has_pipe = input == ChildInput::kEmpty || pipe2(pipe.data(), O_CLOEXEC) == 0;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  if (input == ChildInput::kPipe) {
    posix_spawn_file_actions_adddup2(&actions, pipe[0], STDIN_FILENO);
  } else {
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  }
  posix_spawn_file_actions_adddup2(&actions, output_, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output_, STDERR_FILENO);
  const std::vector<std::string> variables = merged_environment(environment);
  const int problem = output_ < 0 || !has_pipe
                          ? errno
                          : posix_spawnp(&pid_, program_.c_str(), &actions, nullptr,
                                         pointers_of(words).data(), pointers_of(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  if (pipe[0] >= 0) close(pipe[0]);
  input_ = pipe[1];
  // Only so has writing a deadline.
  if (input_ >= 0) fcntl(input_, F_SETFL, O_NONBLOCK);
  if (problem == 0) return;
  close_files();
  throw_error(ErrorCode::kIo, concat("cannot start ", program_, ": ", std::strerror(problem)));
}

ChildProcess::~ChildProcess() {
  end();
  close_files();
}

void ChildProcess::close_files() {
  for (int* file : {&input_, &output_}) {
    if (*file >= 0) close(*file);
    *file = -1;
  }
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

std::string ChildProcess::output_after(std::size_t begin) const {
  struct stat file {};
  if (fstat(output_, &file) != 0) return {};
  const auto size = static_cast<std::size_t>(file.st_size);
  std::string text(size > begin ? size - begin : 0, '\0');
  const ssize_t count = pread(output_, text.data(), text.size(), static_cast<off_t>(begin));
  text.resize(count > 0 ? static_cast<std::size_t>(count) : 0);
  return text;
}

void ChildProcess::write_line(const std::string& line,
                              std::chrono::steady_clock::time_point deadline) {
  const std::string text = line + '\n';
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t count = write(input_, text.data() + done, text.size() - done);
    DISTMOE_CHECK(count > 0 || errno == EINTR || errno == EAGAIN, kIo, program_,
                  " does not read: ", std::strerror(errno));
    if (count > 0) {
      done += static_cast<std::size_t>(count);
    } else {
      DISTMOE_CHECK(std::chrono::steady_clock::now() < deadline, kIo, program_, " does not read");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

std::string ChildProcess::read_line(const std::string& start,
                                    std::chrono::steady_clock::time_point deadline) {
  for (;;) {
    const bool is_last = has_ended() || std::chrono::steady_clock::now() > deadline;
    const std::string text = output_after(num_read_);
    const std::size_t end = text.find('\n');
    if (end != std::string::npos) {
      num_read_ += end + 1;
      if (text.starts_with(start)) return text.substr(0, end);
    } else if (is_last) {
      const std::string all = output_after(0);
      const std::size_t last = all.find_last_not_of('\n');
      const std::size_t begin = all.rfind('\n', last) + 1;
      const std::string words =
          last == std::string::npos ? "it said nothing" : all.substr(begin, last + 1 - begin);
      throw_error(ErrorCode::kIo,
                  concat(program_, has_ended() ? " ended" : " does not answer", ": ", words));
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

ChildResult ChildProcess::wait(std::chrono::steady_clock::time_point deadline) {
  ChildResult result;
  if (input_ >= 0) close(std::exchange(input_, -1));
  result.is_late = !wait_until(deadline);
  end();
  result.exit_code = WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
  result.output = output_after(0);
  return result;
}

}  // namespace distmoe::tools
