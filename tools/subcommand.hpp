// SPDX-License-Identifier: Apache-2.0
//
// What the distmoe command is made of: one subcommand, one file. A new one implements Subcommand,
// declares its maker here and adds it to the table in command_line.cpp.
#pragma once

#include <memory>

#include "exit_code.hpp"

namespace CLI {
class App;
}

namespace distmoe::tools {

class Subcommand {
 public:
  virtual ~Subcommand() = default;

  virtual const char* name() const noexcept = 0;
  /// One line for the list of subcommands.
  virtual const char* summary() const noexcept = 0;
  /// Declares the options. Their values are checked while they are parsed; what is wrong throws
  /// Error(invalid_argument).
  virtual void add_options(CLI::App& app) = 0;
  /// Does the work after a successful parse. An exception ends the command with its exit code.
  virtual ExitCode execute() = 0;
};

std::unique_ptr<Subcommand> make_run_command();
std::unique_ptr<Subcommand> make_compare_command();
std::unique_ptr<Subcommand> make_plan_command();
std::unique_ptr<Subcommand> make_explain_kernels_command();
std::unique_ptr<Subcommand> make_quantize_command();
std::unique_ptr<Subcommand> make_bench_command();
std::unique_ptr<Subcommand> make_report_command();
std::unique_ptr<Subcommand> make_trace_command();
std::unique_ptr<Subcommand> make_info_command();
std::unique_ptr<Subcommand> make_doctor_command();

}  // namespace distmoe::tools
