// SPDX-License-Identifier: Apache-2.0
#include <csignal>
#include <string>
#include <vector>

#include "command_line.hpp"

int main(int argc, char** argv) {
  // A reader of stdout that leaves early and a limit of the file size must not kill a rank: writing
  // fails and says so.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  const std::vector<std::string> words(argv + (argc > 0 ? 1 : 0), argv + argc);
  return static_cast<int>(distmoe::tools::run_command_line(words));
}
