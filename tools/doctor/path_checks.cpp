// SPDX-License-Identifier: Apache-2.0
#include "doctor/path_checks.hpp"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string_view>
#include <vector>

#include "child_process.hpp"
#include "core/check.hpp"
#include "exit_code.hpp"

namespace distmoe::tools {
namespace {

using Clock = std::chrono::steady_clock;
using Words = std::vector<std::string>;

/// Of a rank that waits for another one, then of the whole check.
constexpr const char* kRankTimeout = "20";
constexpr std::chrono::seconds kTimeLimit{40};

std::string own_program() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

Words self_check_words(BackendKind backend, Engine engine) {
  return {own_program(), "doctor",          "--self-check", "--backend", to_string(backend),
          "--engine",    to_string(engine), "--timeout",    kRankTimeout};
}

/// A port at which nobody listens, the next one of which is free too as far as one can know.
int free_port() {
  const int socket_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  DISTMOE_CHECK(socket_fd >= 0, kIo, "no TCP socket can be made");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const bool is_bound =
      bind(socket_fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
      getsockname(socket_fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  close(socket_fd);
  DISTMOE_CHECK(is_bound, kIo, "no TCP port can be bound on 127.0.0.1");
  return ntohs(address.sin_port);
}

std::unique_ptr<ChildProcess> start_with_mpirun(Words words, int num_ranks) {
  Words all{"mpirun", "-n", std::to_string(num_ranks)};
  all.insert(all.end(), words.begin(), words.end());
  // Open MPI alone knows these: root and more ranks than cores are legal.
  return std::make_unique<ChildProcess>(
      all, Words{"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                 "OMPI_MCA_rmaps_base_oversubscribe=1"});
}

std::unique_ptr<ChildProcess> start_as_torchrun(const Words& words, int rank, int num_ranks,
                                                int port) {
  const std::string number = std::to_string(rank);
  return std::make_unique<ChildProcess>(
      words,
      Words{"RANK=" + number, "LOCAL_RANK=" + number, "WORLD_SIZE=" + std::to_string(num_ranks),
            "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + std::to_string(port - 1),
            "TORCHELASTIC_RUN_ID=distmoe-doctor-" + std::to_string(getpid())});
}

std::vector<std::unique_ptr<ChildProcess>> start(BackendKind backend, Engine engine,
                                                 int num_ranks) {
  Words words = self_check_words(backend, engine);
  std::vector<std::unique_ptr<ChildProcess>> children;
  if (engine == Engine::kThreads) {
    words.insert(words.end(), {"--ranks", std::to_string(num_ranks)});
    children.push_back(std::make_unique<ChildProcess>(words, Words{}));
  } else if (engine == Engine::kMpi) {
    children.push_back(start_with_mpirun(words, num_ranks));
  } else {
    const int port = free_port();
    for (int rank = 0; rank < num_ranks; ++rank) {
      children.push_back(start_as_torchrun(words, rank, num_ranks, port));
    }
  }
  return children;
}

/// The first line that the command itself said, without its name; else the last line of all.
std::string telling_line(const std::string& output) {
  constexpr std::string_view kName = "distmoe: ";
  std::string last;
  for (std::size_t begin = 0; begin < output.size();) {
    const std::size_t end = std::min(output.find('\n', begin), output.size());
    std::string line = output.substr(begin, end - begin);
    if (line.starts_with(kName)) return line.substr(kName.size());
    if (line.starts_with("correct: ")) return line;
    if (!line.empty()) last = line;
    begin = end + 1;
  }
  return last;
}

}  // namespace

CheckResult check_path(BackendKind backend, Engine engine, int num_ranks) {
  const auto begin = Clock::now();
  CheckResult result{.is_right = true, .words = {}};
  const Failure failure = attempt([&] {
    for (const auto& child : start(backend, engine, num_ranks)) {
      const ChildResult end = child->wait(begin + kTimeLimit);
      const bool is_right = end.exit_code == 0 && !end.is_late;
      if (result.words.empty() || (result.is_right && !is_right)) {
        result.words = telling_line(end.output);
      }
      result.is_right = result.is_right && is_right;
      if (end.is_late) {
        result.words = concat("it did not end within ", kTimeLimit.count(), " s");
      } else if (result.words.empty() && !is_right) {
        result.words = concat("it ended with exit code ", end.exit_code, " and said nothing");
      }
    }
  });
  if (failure.happened()) result = {.is_right = false, .words = failure.message};
  result.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return result;
}

std::string mpirun_version() {
  std::string version;
  attempt([&] {
    const ChildResult end =
        ChildProcess({"mpirun", "--version"}, {}).wait(Clock::now() + std::chrono::seconds(10));
    if (end.exit_code == 0) version = end.output.substr(0, end.output.find('\n'));
  });
  return version;
}

}  // namespace distmoe::tools
