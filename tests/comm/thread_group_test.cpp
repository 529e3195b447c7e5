// SPDX-License-Identifier: Apache-2.0
//
// Invariant: run_thread_group() joins every rank and rethrows what started the trouble; making,
// forgetting and destroying the communicators of a group never waits.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <numeric>
#include <stdexcept>

#include "comm/communicator_laws.hpp"

namespace distmoe {
namespace {

using laws::CommunicatorPtr;
using laws::Outcome;
using std::chrono::milliseconds;

TEST(RunThreadGroup, GivesEachRankItsOwnThread) {
  std::atomic<int> sum = 0;
  std::mutex mutex;
  std::vector<std::thread::id> threads;
  run_thread_group(5, [&](const CommunicatorPtr& own) {
    own->barrier(laws::kPatient);
    sum += 1 << own->rank();
    const std::lock_guard lock(mutex);
    threads.push_back(std::this_thread::get_id());
  });
  EXPECT_EQ(sum, 31);
  std::sort(threads.begin(), threads.end());
  EXPECT_EQ(std::unique(threads.begin(), threads.end()), threads.end());
}

TEST(RunThreadGroup, RefusesAGroupWithoutRanks) {
  for (const int size : {0, -3}) {
    const auto run = [&] { run_thread_group(size, [](const CommunicatorPtr&) {}); };
    laws::expect_error(laws::outcome_of(run), ErrorCode::kInvalidArgument, {std::to_string(size)});
    const auto make = [&] { make_thread_group(size); };
    laws::expect_error(laws::outcome_of(make), ErrorCode::kInvalidArgument, {std::to_string(size)});
  }
}

TEST(RunThreadGroup, RethrowsWhatStartedTheTroubleAndWakesThePeers) {
  std::vector<Outcome> outcomes(4);
  const auto start = laws::Clock::now();
  try {
    run_thread_group(4, [&](const CommunicatorPtr& own) {
      if (own->rank() == 2) throw std::out_of_range("the disk is full");
      Outcome& outcome = outcomes[static_cast<std::size_t>(own->rank())];
      outcome = laws::outcome_of([&] { own->barrier(laws::kPatient); });
      own->barrier(laws::kPatient);
    });
    FAIL() << "nothing was thrown";
  } catch (const std::out_of_range& error) {
    EXPECT_STREQ(error.what(), "the disk is full");
  }
  EXPECT_LT(laws::Clock::now() - start, milliseconds(1000));
  for (const int rank : {0, 1, 3}) {
    laws::expect_error(outcomes[static_cast<std::size_t>(rank)], ErrorCode::kPeerLost,
                       {"rank 2 aborted: the disk is full", laws::rank_name(rank) + " of 4"});
  }
}

TEST(RunThreadGroup, PrefersTheLowestRankOfSeveralCauses) {
  for (int round = 0; round < 20; ++round) {
    try {
      run_thread_group(4, [](const CommunicatorPtr& own) {
        own->barrier(laws::kPatient);
        if (own->rank() != 0) throw std::runtime_error(laws::rank_name(own->rank()));
        own->barrier(laws::kPatient);  // rank 0 is only a victim
      });
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "rank 1");
    }
  }
}

TEST(RunThreadGroup, RethrowsPeerLostWhereNothingElseWasThrown) {
  const Outcome outcome = laws::outcome_of([] {
    run_thread_group(3, [](const CommunicatorPtr& own) {
      if (own->rank() != 1) own->barrier(laws::kPatient);
    });
  });
  laws::expect_error(outcome, ErrorCode::kPeerLost, {"rank 1 left the group"});
  EXPECT_LT(outcome.seconds, 1.0);
}

TEST(RunThreadGroup, CountsAReturnAsLeavingThoughPointersAreKept) {
  std::vector<CommunicatorPtr> kept(3);
  const Outcome outcome = laws::outcome_of([&] {
    run_thread_group(3, [&](const CommunicatorPtr& own) {
      kept[static_cast<std::size_t>(own->rank())] = own;
      if (own->rank() != 1) own->barrier(laws::kPatient);
    });
  });
  laws::expect_error(outcome, ErrorCode::kPeerLost, {"rank 1 left the group"});
}

TEST(RunThreadGroup, CarriesExceptionsThatAreNotStdExceptions) {
  EXPECT_THROW(run_thread_group(2,
                                [](const CommunicatorPtr& own) {
                                  if (own->rank() == 0) throw 42;
                                  own->barrier(laws::kPatient);
                                }),
               int);
}

// A rank that only left early is not to blame for calls that it took part in to the end.
TEST(ThreadGroup, LeavesCallsAloneThatTheLeaverCompleted) {
  for (int round = 0; round < 200; ++round) {
    run_thread_group(3, [](const CommunicatorPtr& own) {
      laws::Exchange exchange(*own, 7, laws::random_size);
      exchange.run();
      EXPECT_EQ(exchange.first_difference(), "");
      if (own->rank() == 1) own->abort("I have what I need");
    });
  }
}

// reports: A93 (1)
TEST(ThreadGroup, IsDestroyedInAnyOrder) {
  std::vector<int> order(4);
  std::iota(order.begin(), order.end(), 0);
  do {
    auto group = make_thread_group(4);
    const auto start = laws::Clock::now();
    for (const int rank : order) group[static_cast<std::size_t>(rank)].reset();
    ASSERT_LT(laws::Clock::now() - start, milliseconds(1000));
  } while (std::next_permutation(order.begin(), order.end()));
}

// reports: A94 (2) and (3), a forgotten group, with one rank still waiting, at process exit.
TEST(ThreadGroupDeathTest, IsForgottenAtExit) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto start = laws::Clock::now();
  EXPECT_EXIT(
      {
        static auto* const forgotten = new std::vector<CommunicatorPtr>(make_thread_group(3));
        std::thread([] {
          laws::outcome_of([] { forgotten->front()->barrier(laws::kPatient); });
        }).detach();
        std::this_thread::sleep_for(milliseconds(100));
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "");
  EXPECT_LT(laws::Clock::now() - start, milliseconds(5000));
}

// reports: A93, a static group is destroyed with the other statics.
TEST(ThreadGroupDeathTest, IsStatic) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        static auto group = make_thread_group(3);
        group[1].reset();
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST(ThreadGroup, WakesARankThatWaitsWhenAnotherThreadAbortsForIt) {
  const auto group = make_thread_group(2);
  std::thread watchdog([&] {
    std::this_thread::sleep_for(milliseconds(100));
    group[0]->abort("the watchdog barked");
  });
  const Outcome outcome = laws::outcome_of([&] { group[0]->barrier(laws::kPatient); });
  watchdog.join();
  laws::expect_error(outcome, ErrorCode::kPeerLost, {"the watchdog barked"});
  EXPECT_LT(outcome.seconds, 1.0);
}

TEST(ThreadGroup, GivesUpAtOnceWithoutPatience) {
  const auto group = make_thread_group(2);
  for (const int patience : {0, -5}) {
    const Outcome outcome = laws::outcome_of([&] { group[0]->barrier(milliseconds(patience)); });
    laws::expect_error(outcome, ErrorCode::kPeerLost, {"rank 1 did not arrive"});
    EXPECT_LT(outcome.seconds, 1.0);
  }
}

}  // namespace
}  // namespace distmoe
