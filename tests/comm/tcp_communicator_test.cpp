// SPDX-License-Identifier: Apache-2.0
//
// Invariant: ranks find each other whatever else connects to their ports, and a rank that does not
// come, comes twice, belongs to another group, dies or stops is named by the others in time.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "comm/communicator_laws.hpp"
#include "comm/tcp/socket.hpp"
#include "comm/tcp_group.hpp"

namespace distmoe {
namespace {

using laws::Outcome;
using std::chrono::milliseconds;

tcp::Socket connect_to_port(int port) {
  const auto deadline = laws::Clock::now() + milliseconds(5000);
  while (laws::Clock::now() < deadline) {
    for (const tcp::Endpoint& endpoint : tcp::resolve("127.0.0.1", port)) {
      tcp::Socket socket = tcp::connect_to(endpoint, deadline);
      if (socket.is_open()) return socket;
    }
    std::this_thread::sleep_for(milliseconds(5));
  }
  return {};
}

/// What making a communicator of each of `groups` at the same time leads to.
std::vector<Outcome> outcomes_of(const std::vector<TcpGroup>& groups, milliseconds timeout) {
  std::vector<Outcome> outcomes(groups.size());
  std::vector<std::thread> threads;
  threads.reserve(groups.size());
  for (std::size_t i = 0; i < groups.size(); ++i) {
    threads.emplace_back([&, i] {
      outcomes[i] = laws::outcome_of([&] {
        const auto communicator = make_tcp_communicator(groups[i], timeout);
        communicator->barrier(timeout);
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

TEST(TcpRendezvous, NamesTheRanksThatDoNotCome) {
  const int port = free_port();
  const auto outcomes =
      outcomes_of({local_group(0, 4, port), local_group(2, 4, port)}, milliseconds(700));
  for (const Outcome& outcome : outcomes) {
    laws::expect_error(outcome, ErrorCode::kPeerLost, {"ranks 1 and 3 did not come to rank 0"});
    EXPECT_GE(outcome.seconds, 0.6);
    EXPECT_LT(outcome.seconds, 2.0);
  }
}

/// As a wrong WORLD_SIZE makes it.
TEST(TcpRendezvous, CountsTheRanksOfAHugeGroupThatDoNotCome) {
  const auto outcomes = outcomes_of({local_group(0, 1 << 20, free_port())}, milliseconds(300));
  laws::expect_error(outcomes[0], ErrorCode::kPeerLost,
                     {"ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1048567 more did not come to rank 0"});
  EXPECT_LT(outcomes[0].message.size(), 300);
}

TEST(TcpRendezvous, SaysWhereRankZeroWasExpected) {
  const int port = free_port();
  const auto outcomes = outcomes_of({local_group(1, 2, port)}, milliseconds(400));
  laws::expect_error(outcomes[0], ErrorCode::kPeerLost,
                     {"rank 0 did not answer at 127.0.0.1:" + std::to_string(port)});
  EXPECT_LT(outcomes[0].seconds, 2.0);
}

TEST(TcpRendezvous, RefusesGroupsOfDifferentSizes) {
  const int port = free_port();
  const auto outcomes =
      outcomes_of({local_group(0, 3, port), local_group(1, 2, port)}, milliseconds(5000));
  for (const Outcome& outcome : outcomes) {
    laws::expect_error(outcome, ErrorCode::kPeerMismatch, {"rank 0 expects 3 ranks, but rank 1 2"});
    EXPECT_LT(outcome.seconds, 3.0);
  }
}

TEST(TcpRendezvous, RefusesARankThatComesTwice) {
  const int port = free_port();
  const auto outcomes =
      outcomes_of({local_group(0, 3, port), local_group(1, 3, port), local_group(1, 3, port)},
                  milliseconds(5000));
  for (const Outcome& outcome : outcomes) {
    laws::expect_error(outcome, ErrorCode::kPeerMismatch,
                       {"more than one process says that it is rank 1 of 3"});
    EXPECT_LT(outcome.seconds, 3.0);
  }
}

TEST(TcpRendezvous, LeavesRanksOfAnotherJobOut) {
  const int port = free_port();
  TcpGroup other = local_group(1, 2, port);
  other.job = "another";
  const auto outcomes = outcomes_of({local_group(0, 2, port), other}, milliseconds(700));
  laws::expect_error(outcomes[0], ErrorCode::kPeerLost, {"rank 1 did not come"});
  laws::expect_error(outcomes[1], ErrorCode::kPeerLost, {"rank 0 did not answer"});
}

TEST(TcpRendezvous, RefusesGroupsThatCannotBe) {
  for (const TcpGroup& group : {local_group(0, 0, 1), local_group(2, 2, 1), local_group(-1, 2, 1),
                                local_group(0, 2, 0), local_group(0, 2, 65536)}) {
    laws::expect_error(outcomes_of({group}, milliseconds(100))[0], ErrorCode::kInvalidArgument,
                       {"legal"});
  }
}

TEST(TcpRendezvous, SaysThatThePortIsTaken) {
  const tcp::Socket taken = tcp::listen_on(0);
  const int port = tcp::port_of(taken);
  laws::expect_error(outcomes_of({local_group(0, 2, port)}, milliseconds(100))[0],
                     ErrorCode::kUnsupported, {"cannot listen at port", std::to_string(port)});
}

TEST(TcpRendezvous, IgnoresWhoDoesNotSayTheRightWords) {
  const int port = free_port();
  std::thread strangers([port] {
    std::vector<tcp::Socket> kept;
    const auto deadline = laws::Clock::now() + milliseconds(5000);
    const std::vector<std::byte> noise(4096, std::byte{0x47});
    for (const std::size_t length : {0UL, 1UL, 31UL, 32UL, 4096UL}) {
      for (const bool is_kept : {false, true}) {
        tcp::Socket socket = connect_to_port(port);
        ASSERT_TRUE(socket.is_open());
        tcp::send_all(socket, std::span(noise).first(length), deadline);
        if (is_kept) kept.push_back(std::move(socket));
      }
    }
    const auto communicator = make_tcp_communicator(local_group(1, 2, port), laws::kPatient);
    communicator->barrier(laws::kPatient);
  });
  const auto communicator = make_tcp_communicator(local_group(0, 2, port), laws::kPatient);
  communicator->barrier(laws::kPatient);
  strangers.join();
}

TEST(TcpRendezvous, GroupsFollowEachOtherAtOnePort) {
  const int port = free_port();
  std::vector<std::thread> ranks;
  ranks.reserve(3);
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([rank, port] {
      for (std::uint64_t round = 0; round < 20; ++round) {
        const auto communicator = make_tcp_communicator(local_group(rank, 3, port), laws::kPatient);
        const auto values = laws::all_gather(*communicator, 10 * round + rank);
        EXPECT_EQ(values.back(), 10 * round + 2);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST(TcpRendezvous, AHundredRanksMeet) {
  const auto group = make_tcp_group(100);
  std::vector<std::thread> ranks;
  ranks.reserve(group.size());
  for (const auto& communicator : group) {
    ranks.emplace_back([&] {
      const auto values = laws::all_gather(*communicator, communicator->rank());
      EXPECT_EQ(values[99], 99U);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

// --- faults ---

std::uint64_t four_megabytes(std::uint64_t, int, int, int) { return 4U << 20; }

/// Two descriptors a peer: a group that a process cannot hold says so.
TEST(TcpRendezvousDeathTest, SaysThatThereAreTooFewDescriptors) {
#if defined(DISTMOE_SANITIZED)
  GTEST_SKIP() << "UBSan opens pipes to look at objects, and takes them for damaged without one";
#endif
  const auto leave_with_few = [] {
    rlimit few{};
    getrlimit(RLIMIT_NOFILE, &few);
    few.rlim_cur = 24;
    setrlimit(RLIMIT_NOFILE, &few);
    const int port = free_port();
    std::vector<TcpGroup> groups;
    groups.reserve(8);
    for (int rank = 0; rank < 8; ++rank) groups.push_back(local_group(rank, 8, port));
    bool is_told = false;
    for (const Outcome& outcome : outcomes_of(groups, milliseconds(2000))) {
      is_told |= outcome.code == ErrorCode::kUnsupported &&
                 outcome.message.find("ulimit -n") != std::string::npos;
    }
    std::_Exit(is_told ? 0 : 1);
  };
  EXPECT_EXIT(leave_with_few(), testing::ExitedWithCode(0), "");
}

/// Rank 1 is another process, which calls `meet` before it goes on to exchange data without end.
/// Rank 0 does the same until it has an error.
Outcome outcome_beside(void (*meet)()) {
  const int port = free_port();
  const pid_t child = fork();
  const auto communicator =
      make_tcp_communicator(local_group(child == 0 ? 1 : 0, 2, port), laws::kPatient);
  communicator->barrier(laws::kPatient);
  if (child == 0) meet();
  Outcome outcome;
  while (!outcome.code && outcome.seconds < 10) {
    laws::Exchange exchange(*communicator, 1, four_megabytes);
    outcome = laws::outcome_of([&] { exchange.run(laws::kShort); });
  }
  if (child == 0) std::_Exit(0);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return outcome;
}

TEST(TcpFaults, ADeadProcessIsNamedAtOnce) {
  const Outcome outcome = outcome_beside([] { kill(getpid(), SIGKILL); });
  laws::expect_error(outcome, ErrorCode::kPeerLost, {"rank 1 is lost"});
  EXPECT_LT(outcome.seconds, 1.5);
}

TEST(TcpFaults, AStoppedProcessIsNamedAfterTheTimeout) {
  const Outcome outcome = outcome_beside([] { kill(getpid(), SIGSTOP); });
  laws::expect_error(outcome, ErrorCode::kPeerLost, {"rank 1 did not arrive", "2000 ms"});
  EXPECT_LT(outcome.seconds, 3.5);
}

void raise_later(int signal) {
  std::thread([signal] {
    std::this_thread::sleep_for(milliseconds(60));
    kill(getpid(), signal);
  }).detach();
}

TEST(TcpFaults, AProcessThatStopsInTheMiddleIsNamed) {
  const Outcome outcome = outcome_beside([] { raise_later(SIGSTOP); });
  laws::expect_error(outcome, ErrorCode::kPeerLost, {"rank 1", "2000 ms"});
  EXPECT_LT(outcome.seconds, 3.5);
}

TEST(TcpFaults, AProcessThatDiesInTheMiddleIsNamed) {
  const Outcome outcome = outcome_beside([] { raise_later(SIGKILL); });
  laws::expect_error(outcome, ErrorCode::kPeerLost, {"rank 1 is lost"});
  EXPECT_LT(outcome.seconds, 1.5);
}

TEST(TcpFaults, AnAbortFromAnotherThreadEndsAWait) {
  const auto group = make_tcp_group(2);
  std::thread watchdog([&] {
    std::this_thread::sleep_for(milliseconds(200));
    group[0]->abort("the watchdog barked");
  });
  const Outcome own = laws::outcome_of([&] { group[0]->barrier(laws::kPatient); });
  const Outcome peer = laws::outcome_of([&] { group[1]->barrier(laws::kPatient); });
  watchdog.join();
  for (const Outcome& outcome : {own, peer}) {
    laws::expect_error(outcome, ErrorCode::kPeerLost, {"rank 0 aborted: the watchdog barked"});
    EXPECT_LT(outcome.seconds, 1.2);
  }
}

TEST(TorchrunGroup, ReadsWhatTorchrunSets) {
  setenv("RANK", "3", 1);
  setenv("WORLD_SIZE", "8", 1);
  setenv("MASTER_ADDR", "node-a", 1);
  setenv("MASTER_PORT", "29500", 1);
  setenv("TORCHELASTIC_RUN_ID", "run", 1);
  const TcpGroup group = torchrun_group();
  EXPECT_EQ(group.rank, 3);
  EXPECT_EQ(group.size, 8);
  EXPECT_EQ(group.host, "node-a");
  EXPECT_EQ(group.port, 29501);
  EXPECT_EQ(group.job, "run");
  const auto refuse = [](const char* name, const char* value, const std::string& words) {
    const std::string before = std::getenv(name);
    value == nullptr ? unsetenv(name) : setenv(name, value, 1);
    laws::expect_error(laws::outcome_of([] { torchrun_group(); }), ErrorCode::kInvalidArgument,
                       {name, words});
    setenv(name, before.c_str(), 1);
  };
  refuse("RANK", nullptr, "is not set");
  refuse("RANK", "8", "legal: 0..7");
  refuse("RANK", "3x", "legal: 0..7");
  refuse("WORLD_SIZE", "0", "legal: 1..");
  refuse("MASTER_ADDR", nullptr, "is not set");
  refuse("MASTER_PORT", "65535", "legal: 1..65534");
}

}  // namespace
}  // namespace distmoe
