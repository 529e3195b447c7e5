// SPDX-License-Identifier: Apache-2.0
//
// From the words of the shell to a subcommand that is ready to run.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "subcommand.hpp"

namespace distmoe::tools {

struct ParsedCommand {
  std::unique_ptr<Subcommand> subcommand;  ///< null where there is only something to print
  std::string output;                      ///< for stdout: help or version
  std::string error;                       ///< why the words were refused
};

/// `words` without the program name. Never throws for what the words say.
ParsedCommand parse_command_line(std::vector<std::string> words);

/// Parses, runs and reports errors on stderr.
ExitCode run_command_line(std::vector<std::string> words);

}  // namespace distmoe::tools
