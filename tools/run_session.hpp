// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "exit_code.hpp"
#include "run_options.hpp"

namespace distmoe::tools {

/// Makes the ranks that `options` ask for and runs them. Reports failures itself. Does not return
/// where the group broke under MPI: the process ends at once, without MPI_Finalize, because a peer
/// that is stuck would never let it finish.
ExitCode run_session(const RunOptions& options);

}  // namespace distmoe::tools
