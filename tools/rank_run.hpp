// SPDX-License-Identifier: Apache-2.0
//
// One rank of `distmoe run`: reads its experts and tokens, makes the calls, and, on the first rank,
// reports for all.
#pragma once

#include <memory>

#include "distmoe/communicator.hpp"
#include "exit_code.hpp"
#include "memory_meter.hpp"
#include "run_options.hpp"

namespace distmoe::tools {

/// How a rank ended.
struct RankOutcome {
  ExitCode exit_code = ExitCode::kSuccess;
  Failure unreported;  ///< what nobody has printed yet: the group broke before it could agree
  bool is_group_usable =
      true;  ///< false: peers may be stuck or gone; do not finalise the transport
};

/// Collective; all ranks of a usable group return the same exit code, after the first rank has
/// printed and written everything. Never throws. `meter` is this process's, which runs
/// `ranks_in_process` ranks of the group.
RankOutcome run_rank(const RunOptions& options, const std::shared_ptr<Communicator>& communicator,
                     MemoryMeter& meter, int ranks_in_process);

}  // namespace distmoe::tools
