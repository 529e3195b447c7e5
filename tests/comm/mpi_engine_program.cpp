// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the MPI engine obeys the laws of a communicator, and a process leaves in time whatever
// its peers do. Runs under mpirun (run_mpi.sh); MpiEngineFaults and MpiEngineLifetime one case a
// run, because a fault ends MPI for the process. Each rank records its verdict in
// $DISTMOE_TEST_RECORDS/<rank>: output of ranks can interleave, and a launcher's exit status says
// nothing about the survivors of a dead rank.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "comm/communicator_laws.hpp"

namespace distmoe {
namespace {

using laws::CommunicatorPtr;
using laws::Outcome;
using std::chrono::milliseconds;

void check(void (*law)(Communicator&)) { law(*make_mpi_communicator()); }
void check(void (*law)(CommunicatorPtr)) { law(make_mpi_communicator()); }

TEST(MpiEngineLaws, RanksAreNumbered) { check(laws::ranks_are_numbered); }
TEST(MpiEngineLaws, RandomSizesArrive) { check(laws::random_sizes_arrive); }
TEST(MpiEngineLaws, EmptyEntriesAreValid) { check(laws::empty_entries_are_valid); }
TEST(MpiEngineLaws, LargeEntriesArrive) { check(laws::large_entries_arrive); }
TEST(MpiEngineLaws, AThousandCallsStayApart) { check(laws::a_thousand_calls_stay_apart); }
TEST(MpiEngineLaws, ABarrierWaitsForAll) { check(laws::a_barrier_waits_for_all); }
TEST(MpiEngineLaws, ATimeoutMayBeUnlimited) { check(laws::a_timeout_may_be_unlimited); }
TEST(MpiEngineLaws, ArgumentsAreChecked) { check(laws::arguments_are_checked); }
TEST(MpiEngineLaws, ASlowRankIsNotLost) { check(laws::a_slow_rank_is_not_lost); }

TEST(MpiEngineLaws, TwoCommunicatorsStayApart) {
  const CommunicatorPtr first = make_mpi_communicator();
  const CommunicatorPtr second = make_mpi_communicator();
  for (int round = 0; round < 20; ++round) {
    laws::Exchange in_first(*first, 2 * round, laws::random_size);
    laws::Exchange in_second(*second, 2 * round + 1, laws::random_size);
    in_first.run();
    in_second.run();
    ASSERT_EQ(in_first.first_difference(), "");
    ASSERT_EQ(in_second.first_difference(), "");
  }
}

// reports: A93, A95, made and destroyed many times, in an order of each rank's own.
TEST(MpiEngineLaws, ManyAreMadeAndDestroyed) {
  for (int cycle = 0; cycle < 200; ++cycle) {
    CommunicatorPtr first = make_mpi_communicator();
    CommunicatorPtr second = make_mpi_communicator();
    if (cycle % 10 == 0) {
      const auto ranks = laws::all_gather(*second, second->rank());
      ASSERT_EQ(ranks.back(), second->size() - 1);
    }
    ((cycle + first->rank()) % 2 == 0 ? first : second).reset();
  }
}

TEST(MpiEngineFaults, AMissingRankIsReported) { check(laws::a_missing_rank_is_reported); }
TEST(MpiEngineFaults, AllMissingRanksAreReported) { check(laws::all_missing_ranks_are_reported); }
TEST(MpiEngineFaults, AnAbortIsReported) { check(laws::an_abort_is_reported); }
TEST(MpiEngineFaults, LeavingPeersThatWaitIsReported) {
  check(laws::leaving_peers_that_wait_is_reported);
}
TEST(MpiEngineFaults, LeavingBeforePeersWaitIsReported) {
  check(laws::leaving_before_peers_wait_is_reported);
}
TEST(MpiEngineFaults, DifferentSizesAreReported) {
  laws::different_sizes_are_reported(*make_mpi_communicator(), laws::Informed::kPair);
}
TEST(MpiEngineFaults, DifferentCallsAreReported) { check(laws::different_calls_are_reported); }

TEST(MpiEngineFaults, NoCommunicatorIsMadeAfterAFault) {
  const CommunicatorPtr communicator = make_mpi_communicator();
  communicator->barrier(laws::kPatient);
  communicator->abort("enough");
  const Outcome outcome = laws::outcome_of([] { make_mpi_communicator(); });
  laws::expect_error(outcome, ErrorCode::kPeerLost, {"enough"});
}

/// The last rank gets `signal` in the middle of things; the others find out in time.
void check_signal(int signal) {
  const CommunicatorPtr communicator = make_mpi_communicator();
  const int victim = communicator->size() - 1;
  const auto pids = laws::all_gather(*communicator, getpid());
  communicator->barrier(laws::kShort);
  if (communicator->rank() == victim) {
    kill(getpid(), signal);
    return;
  }
  const Outcome outcome = laws::outcome_of(
      [&] { laws::Exchange(*communicator, 1, laws::random_size).run(laws::kShort); });
  laws::expect_error(outcome, ErrorCode::kPeerLost, {laws::rank_name(victim)});
  EXPECT_LT(outcome.seconds, 3.0);
  if (communicator->rank() == 0) kill(static_cast<pid_t>(pids.back()), SIGKILL);
}

TEST(MpiEngineFaults, AStoppedRankIsReported) { check_signal(SIGSTOP); }
TEST(MpiEngineFaults, ADeadRankIsReported) { check_signal(SIGKILL); }

/// Data that is under way when a rank stops: the receives cannot be taken back.
TEST(MpiEngineFaults, ARankThatStopsInTheMiddleIsReported) {
  const CommunicatorPtr communicator = make_mpi_communicator();
  const int victim = communicator->size() - 1;
  const auto pids = laws::all_gather(*communicator, getpid());
  if (communicator->rank() == victim) {
    std::thread([pid = getpid()] {
      std::this_thread::sleep_for(milliseconds(60));
      kill(pid, SIGSTOP);
    }).detach();
  }
  Outcome outcome;
  while (!outcome.code && outcome.seconds < 10) {
    const laws::Exchange::SizeOf size_of = [](std::uint64_t, int, int, int) -> std::uint64_t {
      return 4u << 20;
    };
    laws::Exchange exchange(*communicator, 1, size_of);
    outcome = laws::outcome_of([&] { exchange.run(laws::kShort); });
  }
  if (communicator->rank() == victim) return;
  laws::expect_error(outcome, ErrorCode::kPeerLost, {laws::rank_name(victim)});
  if (communicator->rank() == 0) kill(static_cast<pid_t>(pids.back()), SIGKILL);
}

// reports: A94 (2), a forgotten communicator neither hangs nor crashes a finished job.
TEST(MpiEngineLifetime, ForgottenAtExit) {
  static CommunicatorPtr* const forgotten = new CommunicatorPtr(make_mpi_communicator());
  (*forgotten)->barrier(laws::kShort);
}

// reports: A94 (3)
TEST(MpiEngineLifetime, OneRankExitsFirst) {
  const CommunicatorPtr communicator = make_mpi_communicator();
  communicator->barrier(laws::kPatient);
  if (communicator->rank() != 0) std::this_thread::sleep_for(milliseconds(1000));
}

// reports: A93 (1), a static one is destroyed after MPI was left.
TEST(MpiEngineLifetime, DestroyedAfterMpiWasLeft) {
  static CommunicatorPtr outlives_mpi;
  outlives_mpi = make_mpi_communicator();
  outlives_mpi->barrier(laws::kPatient);
}

}  // namespace
}  // namespace distmoe
