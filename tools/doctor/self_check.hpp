// SPDX-License-Identifier: Apache-2.0
//
// Whether a small forward and its backward on random data give what a plain FP64 computation gives.
#pragma once

#include "exit_code.hpp"
#include "run_options.hpp"

namespace distmoe::tools {

/// On the ranks of `setup`, as launch_ranks() makes them. The first rank prints one line where the
/// results are right; else the reason goes to stderr and the exit code is not 0.
ExitCode run_self_check(const RankSetup& setup);

}  // namespace distmoe::tools
