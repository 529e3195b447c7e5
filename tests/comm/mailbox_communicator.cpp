// SPDX-License-Identifier: Apache-2.0
#include "comm/mailbox_communicator.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

#include "distmoe/error.hpp"

namespace distmoe {

namespace {

using Clock = std::chrono::steady_clock;

struct Message {
  bool is_barrier;
  std::vector<std::byte> data;
};

/// What the ranks share. One lock guards all of it.
struct Mailboxes {
  explicit Mailboxes(int size) : size(size), queues(size * size), has_left(size) {}

  std::deque<Message>& queue(int from, int to) { return queues[from * size + to]; }

  void declare(ErrorCode code, const std::string& reason) {
    if (!fault) fault.emplace(code, reason);
    changed.notify_all();
  }

  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::deque<Message>> queues;
  std::vector<bool> has_left;
  std::optional<Error> fault;
};

class MailboxCommunicator final : public Communicator {
 public:
  MailboxCommunicator(std::shared_ptr<Mailboxes> boxes, int rank)
      : boxes_(std::move(boxes)), rank_(rank) {}

  MailboxCommunicator(const MailboxCommunicator&) = delete;
  MailboxCommunicator& operator=(const MailboxCommunicator&) = delete;
  ~MailboxCommunicator() override {
    const std::lock_guard lock(boxes_->mutex);
    boxes_->has_left[rank_] = true;
    boxes_->changed.notify_all();
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return boxes_->size; }
  std::string_view name() const noexcept override { return "mailbox"; }

  void alltoallv(std::span<const std::span<const std::byte>> send,
                 std::span<const std::span<std::byte>> recv, Timeout timeout) override {
    check(send, recv);
    exchange(false, send, recv, timeout);
  }

  void barrier(Timeout timeout) override {
    const std::vector<std::span<const std::byte>> send(size());
    const std::vector<std::span<std::byte>> recv(size());
    exchange(true, send, recv, timeout);
  }

  void abort(std::string_view reason) noexcept override {
    const std::lock_guard lock(boxes_->mutex);
    boxes_->declare(ErrorCode::kPeerLost, own_name() + " aborted: " + std::string(reason));
  }

 private:
  std::string own_name() const { return "rank " + std::to_string(rank_); }

  void check(std::span<const std::span<const std::byte>> send,
             std::span<const std::span<std::byte>> recv) const {
    const auto refuse = [](const std::string& why) {
      throw Error(ErrorCode::kInvalidArgument, why);
    };
    const auto entries = static_cast<std::size_t>(size());
    if (send.size() != entries || recv.size() != entries) {
      refuse("send or recv has the wrong number of entries");
    }
    for (const auto& entry : send) {
      if (entry.data() == nullptr && !entry.empty()) {
        refuse("a send entry is null but has " + std::to_string(entry.size()) + " bytes");
      }
    }
    if (send[rank_].size() != recv[rank_].size()) {
      refuse(own_name() + " sends " + std::to_string(send[rank_].size()) + " bytes to itself");
    }
  }

  void exchange(bool is_barrier, std::span<const std::span<const std::byte>> send,
                std::span<const std::span<std::byte>> recv, Timeout timeout) {
    const auto deadline = Clock::now() + std::min<Timeout>(timeout, std::chrono::hours(24));
    std::unique_lock lock(boxes_->mutex);
    ++call_;
    throw_fault();
    for (int peer = 0; peer < size(); ++peer) {
      boxes_->queue(rank_, peer).push_back({is_barrier, {send[peer].begin(), send[peer].end()}});
    }
    boxes_->changed.notify_all();
    await_all(lock, deadline, timeout);
    for (int peer = 0; peer < size(); ++peer) take(peer, is_barrier, recv[peer]);
  }

  void await_all(std::unique_lock<std::mutex>& lock, Clock::time_point deadline, Timeout timeout) {
    const auto is_settled = [&] { return boxes_->fault || missing(false).empty(); };
    while (!is_settled()) {
      if (const auto gone = missing(true); !gone.empty()) {
        boxes_->declare(ErrorCode::kPeerLost, name_all(gone) + " left the group");
      } else if (boxes_->changed.wait_until(lock, deadline) == std::cv_status::timeout &&
                 !is_settled()) {
        boxes_->declare(ErrorCode::kPeerLost, name_all(missing(false)) + " did not arrive within " +
                                                  std::to_string(timeout.count()) + " ms");
      }
    }
    if (!missing(false).empty()) throw_fault();
  }

  /// Moves one message out of the mailbox. The lock is held.
  void take(int peer, bool is_barrier, std::span<std::byte> target) {
    const Message message = std::move(boxes_->queue(peer, rank_).front());
    boxes_->queue(peer, rank_).pop_front();
    if (message.is_barrier != is_barrier) {
      boxes_->declare(ErrorCode::kPeerMismatch, "one rank called alltoallv, another barrier");
    } else if (message.data.size() != target.size()) {
      boxes_->declare(ErrorCode::kPeerMismatch, "rank " + std::to_string(peer) + " sends " +
                                                    std::to_string(message.data.size()) +
                                                    " bytes to " + own_name() + ", which expects " +
                                                    std::to_string(target.size()));
    } else if (!target.empty()) {
      std::memcpy(target.data(), message.data.data(), target.size());
      return;
    } else {
      return;
    }
    throw_fault();
  }

  std::vector<int> missing(bool only_left) const {
    std::vector<int> ranks;
    for (int peer = 0; peer < size(); ++peer) {
      if (boxes_->queue(peer, rank_).empty() && (!only_left || boxes_->has_left[peer])) {
        ranks.push_back(peer);
      }
    }
    return ranks;
  }

  static std::string name_all(const std::vector<int>& ranks) {
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      text += (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") + std::to_string(ranks[i]);
    }
    return text;
  }

  void throw_fault() const {
    const std::optional<Error>& fault = boxes_->fault;
    if (!fault) return;
    throw Error(fault->code(), own_name() + " of " + std::to_string(size()) + ", call " +
                                   std::to_string(call_) + ": " + fault->what());
  }

  std::shared_ptr<Mailboxes> boxes_;
  int rank_;
  int call_ = 0;
};

}  // namespace

std::vector<std::shared_ptr<Communicator>> make_mailbox_group(int size) {
  const auto boxes = std::make_shared<Mailboxes>(size);
  std::vector<std::shared_ptr<Communicator>> group;
  group.reserve(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    group.push_back(std::make_shared<MailboxCommunicator>(boxes, rank));
  }
  return group;
}

}  // namespace distmoe
