// SPDX-License-Identifier: Apache-2.0
#include "rank_launch.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "backend/cuda/device.hpp"
#include "core/check.hpp"

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

ExitCode launch_process(const std::shared_ptr<Communicator>& communicator, const RankBody& body) {
  const RankOutcome outcome = body(communicator, 1);
  if (outcome.unreported.happened()) {
    print_error(concat("rank ", communicator->rank(), ": ", outcome.unreported.message));
  }
  if (!outcome.is_group_usable) {
    std::fflush(stdout);
    std::_Exit(static_cast<int>(outcome.exit_code));
  }
  return outcome.exit_code;
}

}  // namespace

ExitCode launch_ranks(const RankSetup& setup, const RankBody& body) {
  return setup.engine == Engine::kThreads ? launch_threads(setup.num_thread_ranks, body)
                                          : launch_process(make_mpi_communicator(), body);
}

int device_of_rank(const RankSetup& setup, int rank) {
  return setup.backend == BackendKind::kCuda ? rank % std::max(cuda::device_count(), 1) : 0;
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

bool is_known_to_all_callers(ErrorCode code) {
  return code == ErrorCode::kInvalidArgument || code == ErrorCode::kCapacityExceeded ||
         code == ErrorCode::kUnsupported;
}

bool is_known_to_all_creators(ErrorCode code) { return code != ErrorCode::kPeerLost; }

}  // namespace distmoe::tools
