// SPDX-License-Identifier: Apache-2.0
//
// The laws that every Communicator obeys, whatever its transport. Each function is called by all
// ranks of a fresh group and checks the rank that it runs on. Laws whose name ends in _is_reported
// end with a group that is of no further use.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "distmoe/communicator.hpp"
#include "distmoe/error.hpp"

namespace distmoe::laws {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

inline constexpr milliseconds kPatient{60000};
inline constexpr milliseconds kShort{2000};
inline constexpr std::byte kPoison{0xCD};

using CommunicatorPtr = std::shared_ptr<Communicator>;

/// A well mixed number that depends on all arguments: payloads and sizes are alike on every rank.
inline std::uint64_t mix(std::uint64_t a, std::uint64_t b, std::uint64_t c = 0,
                         std::uint64_t d = 0) {
  std::uint64_t value = 0x9E3779B97F4A7C15u;
  for (const std::uint64_t part : {a, b, c, d}) {
    value = (value ^ part) * 0xBF58476D1CE4E5B9u;
    value ^= value >> 29;
  }
  return value;
}

/// One alltoallv with owned buffers: guard bytes around every received entry, poisoned contents.
class Exchange {
 public:
  using SizeOf = std::uint64_t (*)(std::uint64_t seed, int from, int to, int size);

  Exchange(Communicator& communicator, std::uint64_t seed, SizeOf size_of)
      : communicator_(communicator), seed_(seed) {
    const int size = communicator.size();
    const int rank = communicator.rank();
    for (int peer = 0; peer < size; ++peer) {
      auto& out = send_.emplace_back(size_of(seed, rank, peer, size));
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = payload(rank, peer, i);
      recv_.emplace_back(size_of(seed, peer, rank, size) + 2 * kGuard, kPoison);
    }
  }

  void run(milliseconds timeout = kPatient) {
    std::vector<std::span<const std::byte>> send(send_.begin(), send_.end());
    std::vector<std::span<std::byte>> recv;
    for (auto& entry : recv_) {
      const std::size_t bytes = entry.size() - 2 * kGuard;
      recv.emplace_back(bytes == 0 ? nullptr : entry.data() + kGuard, bytes);
    }
    for (auto& entry : send) {
      if (entry.empty()) entry = {};  // reports: A02, empty entries have null data
    }
    communicator_.alltoallv(send, recv, timeout);
    // The send buffers belong to the caller again: a peer that still reads them sees poison.
    for (auto& entry : send_) std::fill(entry.begin(), entry.end(), kPoison);
  }

  /// The first wrong byte, in words; empty where all is right.
  std::string first_difference() const {
    for (int peer = 0; peer < communicator_.size(); ++peer) {
      const auto& entry = recv_[static_cast<std::size_t>(peer)];
      for (std::size_t i = 0; i < entry.size(); ++i) {
        const bool is_guard = i < kGuard || i >= entry.size() - kGuard;
        const std::byte expected =
            is_guard ? kPoison : payload(peer, communicator_.rank(), i - kGuard);
        if (entry[i] != expected) {
          return "byte " + std::to_string(i) + " of " + std::to_string(entry.size()) +
                 " from rank " + std::to_string(peer);
        }
      }
    }
    return "";
  }

 private:
  static constexpr std::size_t kGuard = 16;

  std::byte payload(int from, int to, std::size_t i) const {
    const std::uint64_t word = mix(seed_, static_cast<std::uint64_t>(from) * 1000 + to, i / 8);
    return static_cast<std::byte>(word >> (i % 8 * 8));
  }

  Communicator& communicator_;
  std::uint64_t seed_;
  std::vector<std::vector<std::byte>> send_;
  std::vector<std::vector<std::byte>> recv_;
};

/// Sends one number to every rank and returns what each sent.
inline std::vector<std::uint64_t> all_gather(Communicator& communicator, std::uint64_t value,
                                             milliseconds timeout = kPatient) {
  std::vector<std::uint64_t> values(static_cast<std::size_t>(communicator.size()));
  std::vector<std::span<const std::byte>> send(values.size(), std::as_bytes(std::span(&value, 1)));
  std::vector<std::span<std::byte>> recv;
  recv.reserve(values.size());
  for (auto& slot : values) recv.push_back(std::as_writable_bytes(std::span(&slot, 1)));
  communicator.alltoallv(send, recv, timeout);
  return values;
}

inline std::uint64_t random_size(std::uint64_t seed, int from, int to, int size) {
  const bool is_idle = from == static_cast<int>(seed % static_cast<std::uint64_t>(size));
  const std::uint64_t draw = mix(seed, from, to, 77);
  return is_idle || draw % 3 == 0 ? 0 : draw / 3 % 5000;
}

inline void ranks_are_numbered(Communicator& communicator) {
  ASSERT_GE(communicator.rank(), 0);
  ASSERT_LT(communicator.rank(), communicator.size());
  EXPECT_FALSE(communicator.name().empty());
  const auto ranks = all_gather(communicator, communicator.rank());
  std::vector<std::uint64_t> expected(ranks.size());
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(ranks, expected);
}

inline void random_sizes_arrive(Communicator& communicator) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    Exchange exchange(communicator, seed, random_size);
    exchange.run();
    ASSERT_EQ(exchange.first_difference(), "") << "seed " << seed;
  }
}

// reports: A02, one rank receives nothing, then the same rank sends nothing; then nobody does.
inline void empty_entries_are_valid(Communicator& communicator) {
  const Exchange::SizeOf shapes[] = {
      [](std::uint64_t, int from, int to, int) -> std::uint64_t {
        return to == 0 ? 0 : 10 + 7 * from + to;
      },
      [](std::uint64_t, int from, int to, int) -> std::uint64_t {
        return from == 0 ? 0 : 10 + 7 * from + to;
      },
      [](std::uint64_t, int, int, int) -> std::uint64_t { return 0; }};
  for (const Exchange::SizeOf shape : shapes) {
    Exchange exchange(communicator, 5, shape);
    exchange.run();
    ASSERT_EQ(exchange.first_difference(), "");
  }
}

inline void large_entries_arrive(Communicator& communicator) {
  Exchange exchange(communicator, 9, [](std::uint64_t, int from, int to, int) -> std::uint64_t {
    return (3u << 20) / static_cast<unsigned>(1 + from) + static_cast<unsigned>(to);
  });
  exchange.run();
  EXPECT_EQ(exchange.first_difference(), "");
}

// reports: A97, calls that follow each other at once never see each other's data.
inline void a_thousand_calls_stay_apart(Communicator& communicator) {
  const auto size = static_cast<std::uint64_t>(communicator.size());
  std::uint64_t value = 0;
  for (std::uint64_t call = 0; call < 1000; ++call) {
    value = call * 100 + static_cast<std::uint64_t>(communicator.rank());
    const auto values = all_gather(communicator, value);
    for (std::uint64_t peer = 0; peer < size; ++peer) {
      ASSERT_EQ(values[peer], call * 100 + peer) << "call " << call;
    }
    if (call % 7 == 0) communicator.barrier(kPatient);
  }
}

inline void a_barrier_waits_for_all(Communicator& communicator) {
  for (int round = 0; round < 3; ++round) {
    const int delay = (communicator.rank() + round) % communicator.size() * 20;
    std::this_thread::sleep_for(milliseconds(delay));
    const auto entered = Clock::now().time_since_epoch().count();
    communicator.barrier(kPatient);
    const auto left = static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
    for (const std::uint64_t other : all_gather(communicator, entered)) EXPECT_GE(left, other);
  }
}

inline void a_slow_rank_is_not_lost(Communicator& communicator) {
  if (communicator.rank() == 0) std::this_thread::sleep_for(milliseconds(800));
  Exchange exchange(communicator, 3, random_size);
  EXPECT_NO_THROW(exchange.run(kShort));
  EXPECT_EQ(exchange.first_difference(), "");
  if (communicator.rank() == communicator.size() - 1) {
    std::this_thread::sleep_for(milliseconds(800));
  }
  EXPECT_NO_THROW(communicator.barrier(kShort));
}

inline void a_timeout_may_be_unlimited(Communicator& communicator) {
  EXPECT_NO_THROW(communicator.barrier(milliseconds::max()));
}

/// The error that `call` throws and how long it took.
struct Outcome {
  std::optional<ErrorCode> code;
  std::string message;
  double seconds = 0;
};

template <typename Call>
Outcome outcome_of(Call call) {
  Outcome outcome;
  const auto start = Clock::now();
  try {
    call();
  } catch (const Error& error) {
    outcome.code = error.code();
    outcome.message = error.what();
  }
  outcome.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return outcome;
}

inline void expect_error(const Outcome& outcome, ErrorCode code,
                         const std::vector<std::string>& words) {
  ASSERT_TRUE(outcome.code.has_value()) << "no error";
  EXPECT_EQ(to_string(outcome.code.value_or(ErrorCode::kInternal)), std::string(to_string(code)))
      << outcome.message;
  for (const std::string& word : words) {
    EXPECT_NE(outcome.message.find(word), std::string::npos)
        << "'" << word << "' is not in: " << outcome.message;
  }
}

inline std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

// The laws below need two ranks.

inline void arguments_are_checked(Communicator& communicator) {
  const auto size = static_cast<std::size_t>(communicator.size());
  std::vector<std::span<const std::byte>> send(size);
  std::vector<std::span<std::byte>> recv(size);
  const auto call = [&] { communicator.alltoallv(send, recv, kShort); };
  send.pop_back();
  expect_error(outcome_of(call), ErrorCode::kInvalidArgument, {"send"});
  send.emplace_back();
  send.back() = {static_cast<const std::byte*>(nullptr), 3};
  expect_error(outcome_of(call), ErrorCode::kInvalidArgument, {"null", "3 bytes"});
  send.back() = {};
  std::byte own[4];
  send[static_cast<std::size_t>(communicator.rank())] = own;
  expect_error(outcome_of(call), ErrorCode::kInvalidArgument, {"4 bytes to itself"});
  send[static_cast<std::size_t>(communicator.rank())] = {};
  // Nothing was sent and nobody waits: the next correct call works.
  EXPECT_NO_THROW(communicator.alltoallv(send, recv, kPatient));
}

// reports: A06, the call number, the missing rank and the own rank are named, in 2 to 3 s.
inline void a_missing_rank_is_reported(Communicator& communicator) {
  const int rank = communicator.rank();
  const int missing = communicator.size() - 1;
  communicator.barrier(kPatient);
  communicator.barrier(kPatient);
  if (rank == missing) {
    std::this_thread::sleep_for(kShort + milliseconds(1000));
    const Outcome late = outcome_of([&] { communicator.barrier(kPatient); });
    expect_error(late, ErrorCode::kPeerLost, {rank_name(rank)});
    EXPECT_LT(late.seconds, 1.0);
    return;
  }
  const Outcome outcome = outcome_of([&] { communicator.barrier(kShort); });
  expect_error(outcome, ErrorCode::kPeerLost,
               {rank_name(missing) + " did not arrive", rank_name(rank) + " of", "call 3"});
  EXPECT_GE(outcome.seconds, 1.8);
  EXPECT_LT(outcome.seconds, 3.0);
  const Outcome again = outcome_of([&] { communicator.barrier(kPatient); });
  expect_error(again, ErrorCode::kPeerLost, {rank_name(missing)});
  EXPECT_LT(again.seconds, 1.0);
}

/// Needs three ranks: all that are missing are named.
inline void all_missing_ranks_are_reported(Communicator& communicator) {
  const int rank = communicator.rank();
  if (rank != 1) {
    std::this_thread::sleep_for(kShort + milliseconds(1000));
    return;
  }
  std::string names = "ranks 0";
  for (int peer = 2; peer < communicator.size(); ++peer) {
    names += (peer + 1 == communicator.size() ? " and " : ", ") + std::to_string(peer);
  }
  const Outcome outcome = outcome_of([&] { Exchange(communicator, 1, random_size).run(kShort); });
  expect_error(outcome, ErrorCode::kPeerLost, {names + " did not arrive", "rank 1 of"});
}

inline void an_abort_is_reported(Communicator& communicator) {
  communicator.barrier(kPatient);
  if (communicator.rank() == 0) {
    std::this_thread::sleep_for(milliseconds(200));
    communicator.abort("the cat sat on the keyboard");
    communicator.abort("a second reason that nobody hears");
  }
  const Outcome outcome = outcome_of([&] { Exchange(communicator, 1, random_size).run(); });
  expect_error(outcome, ErrorCode::kPeerLost, {"rank 0 aborted: the cat sat on the keyboard"});
  EXPECT_LT(outcome.seconds, 1.2);
}

/// A communicator that is destroyed while peers wait, and one that is destroyed before they do.
inline void leaving_is_reported(CommunicatorPtr communicator, milliseconds delay) {
  const int leaver = communicator->size() / 2;
  const std::string words = rank_name(leaver) + " left the group";
  communicator->barrier(kPatient);
  if (communicator->rank() == leaver) {
    std::this_thread::sleep_for(delay);
    communicator.reset();
    return;
  }
  std::this_thread::sleep_for(milliseconds(200) - delay);
  const Outcome outcome = outcome_of([&] { communicator->barrier(kPatient); });
  expect_error(outcome, ErrorCode::kPeerLost, {words});
  EXPECT_LT(outcome.seconds, 1.2);
}

inline void leaving_peers_that_wait_is_reported(CommunicatorPtr communicator) {
  leaving_is_reported(std::move(communicator), milliseconds(200));
}

inline void leaving_before_peers_wait_is_reported(CommunicatorPtr communicator) {
  leaving_is_reported(std::move(communicator), milliseconds(0));
}

/// Who learns of different sizes in the call itself; the others learn of it in their next call.
enum class Informed { kReceiver, kPair, kAll };

inline void different_sizes_are_reported(Communicator& communicator, Informed informed) {
  const int rank = communicator.rank();
  const auto size = static_cast<std::size_t>(communicator.size());
  const std::vector<std::byte> data(64, kPoison);
  std::vector<std::vector<std::byte>> target(size, std::vector<std::byte>(64));
  std::vector<std::span<const std::byte>> send(size, std::span(data).first(40));
  std::vector<std::span<std::byte>> recv;
  recv.reserve(size);
  for (auto& entry : target) recv.push_back(std::span(entry).first(40));
  if (rank == 0) send[1] = std::span(data).first(48);
  const Outcome outcome = outcome_of([&] { communicator.alltoallv(send, recv, kPatient); });
  if (rank == 1 || informed == Informed::kAll || (informed == Informed::kPair && rank == 0)) {
    expect_error(outcome, ErrorCode::kPeerMismatch,
                 {"rank 0 sends 48 bytes to rank 1, which expects 40"});
  }
  const Outcome next = outcome_of([&] { communicator.barrier(kPatient); });
  expect_error(next, ErrorCode::kPeerMismatch, {"rank 0 sends 48 bytes to rank 1"});
}

inline void different_calls_are_reported(Communicator& communicator) {
  const Outcome outcome = outcome_of([&] {
    if (communicator.rank() == 0) {
      communicator.barrier(kPatient);
    } else {
      all_gather(communicator, 1);
    }
  });
  const bool is_told = outcome.code.has_value();
  const Outcome next = outcome_of([&] { communicator.barrier(kPatient); });
  expect_error(is_told ? outcome : next, ErrorCode::kPeerMismatch, {"alltoallv", "barrier"});
}

}  // namespace distmoe::laws
