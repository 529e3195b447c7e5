// SPDX-License-Identifier: Apache-2.0
#include "comm/thread_group.hpp"

#include <algorithm>
#include <cstring>

#include "core/check.hpp"

namespace distmoe {

ThreadGroup::ThreadGroup(int size) : size_(size), posts_(static_cast<std::size_t>(size)) {}

const char* ThreadGroup::name_of(Call call) {
  return call == Call::kAlltoallv ? "alltoallv" : "barrier";
}

void ThreadGroup::exchange(int rank, SendSpans send, RecvSpans recv,
                           std::chrono::milliseconds timeout) {
  check_exchange(rank, size_, send, recv);
  std::unique_lock lock(mutex_);
  const std::uint64_t number =
      arrive(lock, rank, Post{.call = Call::kAlltoallv, .send = send, .recv = recv}, timeout);
  lock.unlock();

  // NOTE: each rank starts at its right-hand neighbour, so that no two read from one peer at once.
  for (int step = 1; step < size_; ++step) {
    const auto peer = static_cast<std::size_t>((rank + step) % size_);
    const std::span<const std::byte> source = posts_[peer].send[static_cast<std::size_t>(rank)];
    if (!source.empty()) std::memcpy(recv[peer].data(), source.data(), source.size());
  }
  copy_own_entry(rank, send, recv);

  lock.lock();
  if (++copied_ == size_) {
    copied_ = 0;
    completed_ = number;
    changed_.notify_all();
  }
  changed_.wait(lock, [&] { return completed_ >= number; });
}

void ThreadGroup::barrier(int rank, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  arrive(lock, rank, Post{.call = Call::kBarrier}, timeout);
}

std::uint64_t ThreadGroup::arrive(std::unique_lock<std::mutex>& lock, int rank, const Post& post,
                                  std::chrono::milliseconds timeout) {
  try {
    return post_and_wait(lock, rank, post, timeout);
  } catch (const Error&) {
    throw;
  } catch (...) {
    // No memory for the words of a fault; what this rank posted goes with its frame.
    give_up();
    throw;
  }
}

std::uint64_t ThreadGroup::post_and_wait(std::unique_lock<std::mutex>& lock, int rank,
                                         const Post& post, std::chrono::milliseconds timeout) {
  const auto deadline = deadline_after(timeout);
  Post& own = posts_[static_cast<std::size_t>(rank)];
  const std::uint64_t number = own.number + 1;
  if (!fault_) {
    own = post;
    own.number = number;
    if (++arrived_ == size_) {
      release_call();
    } else {
      find_departure(number);
    }
  }
  const auto is_settled = [&] { return released_ >= number || fault_; };
  if (!changed_.wait_until(lock, deadline, is_settled)) {
    declare(ErrorCode::kPeerLost, concat(name_ranks(missing(number)), " did not arrive in call ",
                                         number, " (", name_of(post.call), ") within ",
                                         timeout.count(), " ms, as rank ", rank, " found"));
  }
  // A call that was released runs to its end: a fault that came later belongs to the next one.
  if (released_ < number) throw_fault(rank, post.call, number);
  return number;
}

void ThreadGroup::release_call() {
  find_mismatch();
  if (fault_) return;
  arrived_ = 0;
  ++released_;
  changed_.notify_all();
}

void ThreadGroup::find_mismatch() {
  const Post& first = posts_.front();
  for (int rank = 1; rank < size_; ++rank) {
    const Post& post = posts_[static_cast<std::size_t>(rank)];
    if (post.call == first.call) continue;
    declare(ErrorCode::kPeerMismatch, concat("rank 0 called ", name_of(first.call), " but rank ",
                                             rank, " called ", name_of(post.call)));
    return;
  }
  if (first.call != Call::kAlltoallv) return;
  const auto size = static_cast<std::size_t>(size_);
  for (std::size_t from = 0; from < size; ++from) {
    for (std::size_t to = 0; to < size; ++to) {
      const std::size_t sent = posts_[from].send[to].size();
      const std::size_t expected = posts_[to].recv[from].size();
      if (sent == expected) continue;
      declare(ErrorCode::kPeerMismatch, concat("rank ", from, " sends ", sent, " bytes to rank ",
                                               to, ", which expects ", expected));
      return;
    }
  }
}

void ThreadGroup::find_departure(std::uint64_t number) {
  const auto is_gone = [&](const Post& post) { return post.has_left && post.number < number; };
  if (std::ranges::none_of(posts_, is_gone)) return;
  std::vector<int> gone;
  for (const int rank : missing(number)) {
    if (posts_[static_cast<std::size_t>(rank)].has_left) gone.push_back(rank);
  }
  declare(ErrorCode::kPeerLost, concat(name_ranks(gone), " left the group"));
}

void ThreadGroup::abort(int rank, std::string_view reason) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    declare(ErrorCode::kPeerLost, concat("rank ", rank, " aborted: ", reason));
  } catch (...) {
    give_up();
  }
}

void ThreadGroup::leave(int rank) noexcept {
  const std::lock_guard lock(mutex_);
  posts_[static_cast<std::size_t>(rank)].has_left = true;
  try {
    if (arrived_ > 0) find_departure(released_ + 1);
  } catch (...) {
    give_up();
  }
}

// NOTE: a reason of at most 15 characters takes no memory.
void ThreadGroup::give_up() noexcept {
  if (!fault_) fault_ = Fault{ErrorCode::kPeerLost, "no memory left"};
  changed_.notify_all();
}

void ThreadGroup::declare(ErrorCode code, const std::string& reason) {
  if (fault_) return;
  fault_ = Fault{code, reason};
  changed_.notify_all();
}

std::vector<int> ThreadGroup::missing(std::uint64_t number) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (posts_[static_cast<std::size_t>(rank)].number < number) ranks.push_back(rank);
  }
  return ranks;
}

void ThreadGroup::throw_fault(int rank, Call call, std::uint64_t number) const {
  DISTMOE_CHECK(fault_.has_value(), kInternal, "a call ended without a fault");
  throw_error(fault_->code, concat("rank ", rank, " of ", size_, ", call ", number, " (",
                                   name_of(call), ") of the threads group: ", fault_->reason));
}

}  // namespace distmoe
