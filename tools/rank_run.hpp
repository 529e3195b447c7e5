// SPDX-License-Identifier: Apache-2.0
//
// One rank of `distmoe run`: reads its experts and tokens, makes the calls, and, on the first rank,
// reports for all.
#pragma once

#include <memory>

#include "distmoe/communicator.hpp"
#include "memory_meter.hpp"
#include "rank_launch.hpp"
#include "run_options.hpp"

namespace distmoe::tools {

/// Collective; all ranks of a usable group return the same exit code, after the first rank has
/// printed and written everything. Never throws. `meter` is this process's, which runs
/// `ranks_in_process` ranks of the group.
RankOutcome run_rank(const RunOptions& options, const std::shared_ptr<Communicator>& communicator,
                     MemoryMeter& meter, int ranks_in_process);

}  // namespace distmoe::tools
