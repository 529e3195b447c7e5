// SPDX-License-Identifier: Apache-2.0
//
// The only place that reads environment variables; `distmoe info` lists them.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "distmoe/log.hpp"

namespace distmoe {

struct Environment {
  LogLevel log_level = LogLevel::kWarning;  ///< DISTMOE_LOG_LEVEL
  int num_threads = 0;                      ///< DISTMOE_NUM_THREADS; 0 where it is not set
  std::string cpu_matmul;                   ///< DISTMOE_CPU_MATMUL; empty where it is not set
  std::vector<std::string> complaints;      ///< one a variable whose value is not legal
};

struct EnvironmentVariable {
  const char* name;
  const char* legal;
  const char* meaning;
};

/// Read once, at first use. A value that is not legal is ignored; the first call of environment()
/// or of log() logs it as a warning, so that the sink of that moment decides what becomes of it.
const Environment& environment();

/// The same without logging, for the log itself.
const Environment& unreported_environment();

/// Every variable that the library reads, for `distmoe info` and docs.
std::span<const EnvironmentVariable> environment_variables();

/// The text that `variable` has now; empty where it is not set.
std::optional<std::string> environment_value(const EnvironmentVariable& variable);

}  // namespace distmoe
