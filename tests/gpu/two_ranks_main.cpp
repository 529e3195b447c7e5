// SPDX-License-Identifier: Apache-2.0
//
// The main of a test whose cases run on two ranks, each a process: without torchrun's variables it
// starts itself twice with them, and passes where both do. A rank that was killed has not failed.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "comm/tcp_group.hpp"

namespace {

constexpr int kRanks = 2;

[[noreturn]] void become_rank(int rank, int port, char** arguments) {
  setenv("RANK", std::to_string(rank).c_str(), 1);
  setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  setenv("WORLD_SIZE", std::to_string(kRanks).c_str(), 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", std::to_string(port - 1).c_str(), 1);
  execv("/proc/self/exe", arguments);
  std::_Exit(127);
}

int run_ranks(char** arguments) {
  const int port = distmoe::free_port();
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(fork());
    if (ranks.back() == 0) become_rank(rank, port, arguments);
  }
  int worst = 0;
  for (const pid_t rank : ranks) {
    int status = 0;
    waitpid(rank, &status, 0);
    const bool was_killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (!was_killed && !(WIFEXITED(status) && WEXITSTATUS(status) == 0)) worst = 1;
  }
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  bool is_listing = false;
  for (int i = 1; i < argc; ++i) is_listing |= std::string_view(argv[i]) == "--gtest_list_tests";
  if (!is_listing && std::getenv("RANK") == nullptr) return run_ranks(argv);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
