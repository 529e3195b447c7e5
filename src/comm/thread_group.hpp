// SPDX-License-Identifier: Apache-2.0
//
// The state that the ranks of a threads group share: a rendezvous. Every rank posts its spans; the
// last one checks that they fit together and releases the call; each rank then copies what it
// receives straight out of its peers' send spans and stays until all have copied, so that send
// buffers may be reused on return.
//
// Waiting for arrivals is bounded by the timeout. Waiting for the copies is not: between release
// and completion no user code runs, and a rank that left early would pull its send buffers away
// from under a peer that reads them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/exchange.hpp"
#include "distmoe/error.hpp"

namespace distmoe {

class ThreadGroup {
 public:
  explicit ThreadGroup(int size);

  int size() const noexcept { return size_; }

  void exchange(int rank, SendSpans send, RecvSpans recv, std::chrono::milliseconds timeout);
  void barrier(int rank, std::chrono::milliseconds timeout);

  /// `rank` gives up. Only the first fault of a group counts.
  void abort(int rank, std::string_view reason) noexcept;
  /// `rank` makes no further call. A fault only where a peer needs it. Idempotent.
  void leave(int rank) noexcept;

 private:
  enum class Call : std::uint8_t { kNone, kAlltoallv, kBarrier };

  struct Post {
    Call call = Call::kNone;
    std::uint64_t number = 0;  // of the latest call that this rank entered, from 1
    bool has_left = false;
    SendSpans send = {};
    RecvSpans recv = {};
  };

  struct Fault {
    ErrorCode code;
    std::string reason;
  };

  static const char* name_of(Call call);

  /// Posts the call and returns once every rank has; throws the group's fault. Holds `lock`.
  std::uint64_t arrive(std::unique_lock<std::mutex>& lock, int rank, const Post& post,
                       std::chrono::milliseconds timeout);
  std::uint64_t post_and_wait(std::unique_lock<std::mutex>& lock, int rank, const Post& post,
                              std::chrono::milliseconds timeout);
  void release_call();
  void find_mismatch();
  void find_departure(std::uint64_t number);
  void declare(ErrorCode code, const std::string& reason);
  /// A fault of a rank that has no memory for words. Holds the lock.
  void give_up() noexcept;
  std::vector<int> missing(std::uint64_t number) const;
  [[noreturn]] void throw_fault(int rank, Call call, std::uint64_t number) const;

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Post> posts_;
  int arrived_ = 0;              // ranks in the call that is not released yet
  int copied_ = 0;               // ranks that copied in the released call
  std::uint64_t released_ = 0;   // calls that every rank entered
  std::uint64_t completed_ = 0;  // exchanges that every rank copied: the number of the latest
  std::optional<Fault> fault_;
};

}  // namespace distmoe
