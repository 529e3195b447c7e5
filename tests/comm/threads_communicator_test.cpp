// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the threads engine, the TCP engine and a communicator that a user wrote over the
// public header alone obey the same laws for every number of ranks; no wait outlasts its timeout.
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

#include "comm/communicator_laws.hpp"
#include "comm/mailbox_communicator.hpp"
#include "comm/tcp_group.hpp"

namespace distmoe {
namespace {

using laws::CommunicatorPtr;
using std::chrono::milliseconds;

struct Engine {
  const char* name;
  std::vector<CommunicatorPtr> (*make_group)(int size);
  laws::Informed informed;
};

std::ostream& operator<<(std::ostream& out, const Engine& engine) { return out << engine.name; }

/// Runs `body` on one thread a rank; each thread owns its communicator.
template <typename Body>
void run_on(std::vector<CommunicatorPtr> group, Body body) {
  std::vector<std::thread> threads;
  threads.reserve(group.size());
  for (auto& communicator : group) {
    threads.emplace_back([&body, own = std::move(communicator)]() mutable {
      EXPECT_NO_THROW(body(std::move(own)));
    });
  }
  for (auto& thread : threads) thread.join();
}

constexpr Engine kEngines[] = {{"Threads", make_thread_group, laws::Informed::kAll},
                               {"Mailbox", make_mailbox_group, laws::Informed::kReceiver},
                               {"Tcp", make_tcp_group, laws::Informed::kPair}};

class CommunicatorLaws : public ::testing::TestWithParam<std::tuple<Engine, int>> {
 protected:
  void check(void (*law)(Communicator&)) {
    const auto& [engine, size] = GetParam();
    run_on(engine.make_group(size), [law](const CommunicatorPtr& own) { law(*own); });
  }
  /// A law in which a rank destroys its communicator.
  void check(void (*law)(CommunicatorPtr)) {
    const auto& [engine, size] = GetParam();
    run_on(engine.make_group(size), law);
  }
};

std::string name_of(const ::testing::TestParamInfo<std::tuple<Engine, int>>& info) {
  return std::get<0>(info.param).name + std::string("P") + std::to_string(std::get<1>(info.param));
}

TEST_P(CommunicatorLaws, RanksAreNumbered) { check(laws::ranks_are_numbered); }
TEST_P(CommunicatorLaws, RandomSizesArrive) { check(laws::random_sizes_arrive); }
TEST_P(CommunicatorLaws, EmptyEntriesAreValid) { check(laws::empty_entries_are_valid); }
TEST_P(CommunicatorLaws, LargeEntriesArrive) { check(laws::large_entries_arrive); }
TEST_P(CommunicatorLaws, AThousandCallsStayApart) { check(laws::a_thousand_calls_stay_apart); }
TEST_P(CommunicatorLaws, ABarrierWaitsForAll) { check(laws::a_barrier_waits_for_all); }
TEST_P(CommunicatorLaws, ATimeoutMayBeUnlimited) { check(laws::a_timeout_may_be_unlimited); }
TEST_P(CommunicatorLaws, ArgumentsAreChecked) { check(laws::arguments_are_checked); }

INSTANTIATE_TEST_SUITE_P(All, CommunicatorLaws,
                         ::testing::Combine(::testing::ValuesIn(kEngines),
                                            ::testing::Values(1, 2, 3, 4, 5, 8)),
                         name_of);

class CommunicatorFaultLaws : public CommunicatorLaws {};

TEST_P(CommunicatorFaultLaws, ASlowRankIsNotLost) { check(laws::a_slow_rank_is_not_lost); }
TEST_P(CommunicatorFaultLaws, AMissingRankIsReported) { check(laws::a_missing_rank_is_reported); }
TEST_P(CommunicatorFaultLaws, AnAbortIsReported) { check(laws::an_abort_is_reported); }
TEST_P(CommunicatorFaultLaws, LeavingPeersThatWaitIsReported) {
  check(laws::leaving_peers_that_wait_is_reported);
}
TEST_P(CommunicatorFaultLaws, LeavingBeforePeersWaitIsReported) {
  check(laws::leaving_before_peers_wait_is_reported);
}
TEST_P(CommunicatorFaultLaws, DifferentSizesAreReported) {
  const auto& [engine, size] = GetParam();
  run_on(engine.make_group(size), [informed = engine.informed](const CommunicatorPtr& own) {
    laws::different_sizes_are_reported(*own, informed);
  });
}
TEST_P(CommunicatorFaultLaws, DifferentCallsAreReported) {
  check(laws::different_calls_are_reported);
}

INSTANTIATE_TEST_SUITE_P(All, CommunicatorFaultLaws,
                         ::testing::Combine(::testing::ValuesIn(kEngines), ::testing::Values(2, 4)),
                         name_of);

class CommunicatorManyRanksLaws : public CommunicatorLaws {};

TEST_P(CommunicatorManyRanksLaws, AllMissingRanksAreReported) {
  check(laws::all_missing_ranks_are_reported);
}

INSTANTIATE_TEST_SUITE_P(All, CommunicatorManyRanksLaws,
                         ::testing::Combine(::testing::ValuesIn(kEngines), ::testing::Values(3)),
                         name_of);

}  // namespace
}  // namespace distmoe
