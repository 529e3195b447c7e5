// SPDX-License-Identifier: Apache-2.0
//
// The only place that reads or sets environment variables; `distmoe info` lists them.
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
  std::string nccl_library;                 ///< DISTMOE_NCCL_LIBRARY; empty where it is not set
  std::vector<std::string> complaints;      ///< one a variable whose value is not legal
};

/// What the launcher of this process says, as it stands there; empty where it says nothing.
struct LauncherEnvironment {
  std::string rank;         ///< RANK
  std::string world_size;   ///< WORLD_SIZE
  std::string master_addr;  ///< MASTER_ADDR
  std::string master_port;  ///< MASTER_PORT
  std::string run_id;       ///< TORCHELASTIC_RUN_ID
  std::string local_rank;   ///< LOCAL_RANK, else OMPI_COMM_WORLD_LOCAL_RANK
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

/// Read anew by every call.
LauncherEnvironment launcher_environment();

/// NCCL uses NVLink multicast unless NCCL_NVLS_ENABLE=0; this sets it where the variable is not
/// set. Call before NCCL is loaded.
void leave_nvlink_multicast_unused();

/// Every variable of the library's own, for `distmoe info` and docs.
std::span<const EnvironmentVariable> environment_variables();
/// Every variable of others that it reads.
std::span<const EnvironmentVariable> launcher_variables();

/// The text that `variable` has now; empty where it is not set.
std::optional<std::string> environment_value(const EnvironmentVariable& variable);

}  // namespace distmoe
