// SPDX-License-Identifier: Apache-2.0
//
// The only place that reads environment variables; `distmoe info` lists them.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "distmoe/log.hpp"

namespace distmoe {

struct Environment {
  LogLevel log_level = LogLevel::kWarning;  ///< DISTMOE_LOG_LEVEL
  int num_threads = 0;                      ///< DISTMOE_NUM_THREADS; 0 where it is not set
  std::string cpu_matmul;                   ///< DISTMOE_CPU_MATMUL; empty where it is not set
};

struct EnvironmentVariable {
  const char* name;
  const char* legal;
  const char* meaning;
};

/// Read once, at first use. A value that is not legal is logged and ignored.
const Environment& environment();

/// Every variable that the library reads, for `distmoe info` and docs.
std::span<const EnvironmentVariable> environment_variables();

/// The text that `variable` has now; empty where it is not set.
std::optional<std::string> environment_value(const EnvironmentVariable& variable);

}  // namespace distmoe
