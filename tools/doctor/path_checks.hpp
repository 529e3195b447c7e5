// SPDX-License-Identifier: Apache-2.0
//
// The self check of one backend over one engine, in processes of its own: what crashes or hangs
// there is an answer here.
#pragma once

#include <string>

#include "run_options.hpp"

namespace distmoe::tools {

struct CheckResult {
  bool is_right = false;
  std::string words;  ///< what it said, one line
  double seconds = 0.0;
};

/// Ranks are threads of one process, processes of mpirun, or processes with torchrun's variables.
CheckResult check_path(BackendKind backend, Engine engine, int num_ranks);

/// What `mpirun --version` says first; empty where there is no mpirun.
std::string mpirun_version();

}  // namespace distmoe::tools
