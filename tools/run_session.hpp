// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "exit_code.hpp"
#include "run_options.hpp"

namespace distmoe::tools {

/// Makes the ranks that `options` ask for and runs them, as launch_ranks says. Reports failures
/// itself.
ExitCode run_session(const RunOptions& options);

}  // namespace distmoe::tools
