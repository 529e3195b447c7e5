// SPDX-License-Identifier: Apache-2.0
#include "rank_launch.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/check.hpp"
#include "core/environment.hpp"
#include "device_choice.hpp"

namespace distmoe::tools {
namespace {

// Peers that merely lost a rank say less than the rank that failed.
const Failure& most_telling(const std::vector<RankOutcome>& outcomes) {
  const auto telling = std::find_if(outcomes.begin(), outcomes.end(), [](const auto& outcome) {
    return outcome.unreported.happened() && outcome.unreported.error != ErrorCode::kPeerLost;
  });
  if (telling != outcomes.end()) return telling->unreported;
  const auto any = std::find_if(outcomes.begin(), outcomes.end(),
                                [](const auto& outcome) { return outcome.unreported.happened(); });
  return any != outcomes.end() ? any->unreported : outcomes.front().unreported;
}

ExitCode launch_threads(int num_ranks, const RankBody& body) {
  std::vector<RankOutcome> outcomes(static_cast<std::size_t>(num_ranks));
  run_thread_group(num_ranks, [&](const std::shared_ptr<Communicator>& communicator) {
    outcomes[static_cast<std::size_t>(communicator->rank())] = body(communicator, num_ranks);
  });
  const Failure& failure = most_telling(outcomes);
  if (failure.happened()) print_error(failure.message);
  return std::max_element(outcomes.begin(), outcomes.end(),
                          [](const auto& a, const auto& b) { return a.exit_code < b.exit_code; })
      ->exit_code;
}

[[noreturn]] void leave_at_once(ExitCode exit_code) {
  std::fflush(stdout);
  std::_Exit(static_cast<int>(exit_code));
}

ExitCode run_process(const std::shared_ptr<Communicator>& communicator, const RankBody& body) {
  const RankOutcome outcome = body(communicator, 1);
  if (outcome.unreported.happened()) {
    print_error(concat("rank ", communicator->rank(), ": ", outcome.unreported.message));
  }
  if (!outcome.is_group_usable) leave_at_once(outcome.exit_code);
  return outcome.exit_code;
}

/// The communicator of a process that a launcher started.
std::shared_ptr<Communicator> make_host_communicator(const RankSetup& setup) {
  const bool is_torchrun = !launcher_environment().rank.empty();
  if (setup.engine == Engine::kMpi || (setup.engine == Engine::kNccl && !is_torchrun)) {
    return make_mpi_communicator();
  }
  return make_tcp_communicator(torchrun_group(), setup.timeout);
}

/// Adds NCCL to the host's communicator. All ranks learn of a failure alike, unless one is lost.
Failure add_nccl(const RankSetup& setup, std::shared_ptr<Communicator>& communicator) {
  const std::shared_ptr<Communicator> host = communicator;
  const Failure failure = attempt([&] {
    communicator = make_nccl_communicator(host, device_of_process(host->rank()), setup.timeout);
  });
  if (!failure.happened()) return failure;
  const bool is_known_to_all = failure.error != ErrorCode::kPeerLost;
  if (host->rank() == 0 || !is_known_to_all) print_error(failure.message);
  if (!is_known_to_all) leave_at_once(failure.exit_code);
  // NOTE: mpirun ends all processes once one has failed.
  host->barrier(setup.timeout);
  return failure;
}

ExitCode launch_process(const RankSetup& setup, const RankBody& body) {
  // Refuses what the launcher says, where it is not legal, before the ranks meet.
  device_of_process(0);
  std::shared_ptr<Communicator> communicator = make_host_communicator(setup);
  if (setup.engine == Engine::kNccl) {
    const Failure failure = add_nccl(setup, communicator);
    if (failure.happened()) return failure.exit_code;
  }
  return run_process(communicator, body);
}

}  // namespace

ExitCode launch_ranks(const RankSetup& setup, const RankBody& body) {
  DISTMOE_CHECK(setup.engine != Engine::kNccl || setup.backend == BackendKind::kCuda,
                kInvalidArgument,
                "--engine nccl moves data between GPUs: it needs --backend cuda; ",
                "--engine mpi and --engine tcp are for --backend cpu");
  return setup.engine == Engine::kThreads ? launch_threads(setup.num_thread_ranks, body)
                                          : launch_process(setup, body);
}

int device_of_rank(const RankSetup& setup, int rank) {
  if (setup.backend == BackendKind::kCpu) return 0;
  return setup.engine == Engine::kThreads ? device_of_thread(rank) : device_of_process(rank);
}

RankOutcome run_rank_steps(Communicator& communicator, const std::function<ExitCode()>& steps,
                           const std::function<void()>& clean_up) {
  try {
    return {steps(), {}, true};
  } catch (...) {
    Failure failure = failure_of_current_exception();
    failure.exit_code = ExitCode::kRuntimeFailure;
    clean_up();
    // Peers that are about to find the same mismatch shall say so, not that this rank left.
    if (failure.error != ErrorCode::kPeerMismatch) communicator.abort(failure.message);
    return {failure.exit_code, failure, false};
  }
}

ExitCode leave_together(RankGroup& group, const Failure& failure) {
  if (group.is_first() && failure.happened()) print_error(failure.message);
  // NOTE: mpirun ends all processes once one has failed, so nobody leaves before the first rank
  // has said everything.
  group.barrier();
  return failure.exit_code;
}

bool is_known_to_all_callers(ErrorCode code) {
  return code == ErrorCode::kInvalidArgument || code == ErrorCode::kCapacityExceeded ||
         code == ErrorCode::kUnsupported;
}

bool is_known_to_all_creators(ErrorCode code) { return code != ErrorCode::kPeerLost; }

}  // namespace distmoe::tools
