// SPDX-License-Identifier: Apache-2.0
#include "run_session.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "core/check.hpp"
#include "distmoe/communicator.hpp"
#include "memory_meter.hpp"
#include "rank_run.hpp"

namespace distmoe::tools {
namespace {

int num_thread_ranks(const RunOptions& options) {
  if (options.ranks) return *options.ranks;
  return options.tokens_per_rank ? static_cast<int>(options.tokens_per_rank->size()) : 1;
}

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

ExitCode run_threads(const RunOptions& options) {
  const int num_ranks = num_thread_ranks(options);
  std::vector<RankOutcome> outcomes(static_cast<std::size_t>(num_ranks));
  MemoryMeter meter;
  run_thread_group(num_ranks, [&](const std::shared_ptr<Communicator>& communicator) {
    RankOutcome& outcome = outcomes[static_cast<std::size_t>(communicator->rank())];
    outcome = run_rank(options, communicator, meter, num_ranks);
  });
  const Failure& failure = most_telling(outcomes);
  if (failure.happened()) print_error(failure.message);
  return std::max_element(outcomes.begin(), outcomes.end(),
                          [](const auto& a, const auto& b) { return a.exit_code < b.exit_code; })
      ->exit_code;
}

ExitCode run_mpi(const RunOptions& options) {
  const std::shared_ptr<Communicator> communicator = make_mpi_communicator();
  MemoryMeter meter;
  const RankOutcome outcome = run_rank(options, communicator, meter, 1);
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

ExitCode run_session(const RunOptions& options) {
  return options.engine == Engine::kThreads ? run_threads(options) : run_mpi(options);
}

}  // namespace distmoe::tools
