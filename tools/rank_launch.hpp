// SPDX-License-Identifier: Apache-2.0
//
// The ranks of a command: how an engine starts them, which device each gets, and how they end
// together.
#pragma once

#include <functional>
#include <memory>

#include "distmoe/communicator.hpp"
#include "exit_code.hpp"
#include "rank_group.hpp"
#include "run_options.hpp"

namespace distmoe::tools {

/// How a rank ended.
struct RankOutcome {
  ExitCode exit_code = ExitCode::kSuccess;
  Failure unreported;  ///< what nobody has printed yet: the group broke before it could agree
  bool is_group_usable =
      true;  ///< false: peers may be stuck or gone; do not finalise the transport
};

/// One rank's work. This process runs `ranks_in_process` ranks of the group. Never throws.
using RankBody =
    std::function<RankOutcome(const std::shared_ptr<Communicator>&, int ranks_in_process)>;

/// Runs `body` on every rank that this process starts: all of them with threads, where a launcher
/// starts the processes one. Reports what the ranks did not. Does not return where a group of
/// processes broke: this one ends at once, without MPI_Finalize, because a peer that is stuck would
/// never let it finish.
ExitCode launch_ranks(const RankSetup& setup, const RankBody& body);

/// The CUDA ordinal of a rank, which ranks share where there are more of them than devices; 0 on
/// the CPU.
int device_of_rank(const RankSetup& setup, int rank);

/// A body out of `steps`, whose exit code all ranks share. What they throw happened to this rank
/// alone: it cleans up and tells the others that it leaves.
RankOutcome run_rank_steps(Communicator& communicator, const std::function<ExitCode()>& steps,
                           const std::function<void()>& clean_up);

/// The end of such steps, which `failure` may have stopped on all ranks: the first rank prints it.
ExitCode leave_together(RankGroup& group, const Failure& failure);

/// What every rank of a call gets in the same call. With anything else a rank leaves peers that
/// wait for it.
bool is_known_to_all_callers(ErrorCode code);
/// Creating a context tells all ranks why one of them cannot, whatever it is.
bool is_known_to_all_creators(ErrorCode code);

/// For steps in which all ranks take part: what happened to this rank alone stays an exception.
template <typename Step>
Failure attempt_together(bool (*is_known_to_all)(ErrorCode), const Step& step) {
  try {
    step();
    return {};
  } catch (const Error& error) {
    if (!is_known_to_all(error.code())) throw;
    return failure_of_current_exception();
  }
}

}  // namespace distmoe::tools
