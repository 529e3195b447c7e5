// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/tcp_communicator.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "core/check.hpp"

namespace distmoe::tcp {
namespace {

constexpr int kLongestPoll = 1000;  // milliseconds

const char* name_of(bool is_barrier) { return is_barrier ? "barrier" : "alltoallv"; }

}  // namespace

TcpCommunicator::TcpCommunicator(const TcpGroup& group, std::vector<Link> links)
    : rank_(group.rank), peers_(links.size()), wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  DISTMOE_CHECK(wake_.is_open(), kInternal, "no eventfd: ", std::strerror(errno));
  for (std::size_t i = 0; i < links.size(); ++i) peers_[i].link = std::move(links[i]);
}

TcpCommunicator::~TcpCommunicator() {
  // NOTE: closing with bytes of a peer unread resets its connection. Only a peer that has all of
  // this rank's data can be so far ahead, so that none is lost.
  tell_peers({});
}

void TcpCommunicator::alltoallv(SendSpans send, RecvSpans recv, Timeout timeout) {
  check_exchange(rank(), size(), send, recv);
  run(Kind::kAlltoallv, send, recv, timeout);
  copy_own_entry(rank(), send, recv);
}

void TcpCommunicator::barrier(Timeout timeout) { run(Kind::kBarrier, {}, {}, timeout); }

void TcpCommunicator::abort(std::string_view reason) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    declare(ErrorCode::kPeerLost, concat("rank ", rank_, " aborted: ", reason), num_completed_);
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t count = write(wake_.fd(), &one, sizeof(one));
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch)
    // No memory for the words: the peers find out through their timeout.
  }
}

// --- a call ---

void TcpCommunicator::run(Kind kind, SendSpans send, RecvSpans recv, Timeout timeout) {
  const Deadline deadline = deadline_after(timeout);
  std::unique_lock lock(mutex_);
  const Call call{++num_calls_, kind, send, recv};
  begin(call);
  for (;;) {
    // NOTE: read before the clock, so that what arrived in time counts.
    const bool is_late = std::chrono::steady_clock::now() >= deadline;
    read_control();
    if (is_ended(call)) throw_fault(call);
    const bool is_done = advance(call);
    if (is_ended(call)) throw_fault(call);
    if (is_done) break;
    find_departures(call);
    if (is_late) declare_late(call, timeout);
    if (is_ended(call)) throw_fault(call);
    const std::vector<pollfd> waiting = interests(call);
    lock.unlock();
    wait(waiting, deadline);
    lock.lock();
  }
  num_completed_ = call.number;
}

void TcpCommunicator::begin(const Call& call) {
  for (int rank = 0; rank < size(); ++rank) {
    Peer& to = peer(rank);
    to.header_out = {call.number, call.kind, call.out(rank).size(), call.in(rank).size()};
    to.header_in = {};
    to.bytes_out = 0;
    to.bytes_in = 0;
  }
}

bool TcpCommunicator::advance(const Call& call) {
  bool is_done = true;
  for (int step = 1; step < size() && !is_ended(call); ++step) {
    const int rank = (rank_ + step) % size();
    send_to(call, rank);
    receive_from(call, rank);
    is_done = is_done && is_complete(call, rank);
  }
  return is_done;
}

bool TcpCommunicator::is_complete(const Call& call, int rank) const {
  const Peer& with = peer(rank);
  return with.bytes_out == sizeof(Header) + call.out(rank).size() &&
         with.bytes_in == sizeof(Header) + call.in(rank).size();
}

void TcpCommunicator::send_to(const Call& call, int rank) {
  Peer& to = peer(rank);
  const auto header = std::as_bytes(std::span(&to.header_out, 1));
  while (!to.calls_closed && to.bytes_out < header.size() + call.out(rank).size()) {
    const auto rest = to.bytes_out < header.size()
                          ? header.subspan(to.bytes_out)
                          : call.out(rank).subspan(to.bytes_out - header.size());
    const Transfer sent = send_some(to.link.calls, rest);
    to.bytes_out += sent.bytes;
    if (sent.bytes == rest.size()) continue;
    // NOTE: a connection that can no longer send may still hold what the peer sent before.
    const bool has_all = to.bytes_in == sizeof(Header) + call.in(rank).size();
    to.calls_closed = sent.is_closed && has_all;
    break;
  }
}

void TcpCommunicator::receive_from(const Call& call, int rank) {
  Peer& from = peer(rank);
  if (!from.has_arrived()) {
    const auto header = std::as_writable_bytes(std::span(&from.header_in, 1));
    const Transfer received = receive_some(from.link.calls, header.subspan(from.bytes_in));
    from.bytes_in += received.bytes;
    if (!from.has_arrived()) {
      from.calls_closed = from.calls_closed || received.is_closed;
      return;
    }
    check_header(call, rank);
    if (is_ended(call)) return;
  }
  const auto rest = call.in(rank).subspan(from.bytes_in - sizeof(Header));
  const Transfer received = receive_some(from.link.calls, rest);
  from.bytes_in += received.bytes;
  from.calls_closed = from.calls_closed || received.is_closed;
}

void TcpCommunicator::check_header(const Call& call, int rank) {
  const Header& header = peer(rank).header_in;
  const std::uint64_t expected = call.in(rank).size();
  const std::uint64_t sent = call.out(rank).size();
  std::string reason;
  if (header.kind > Kind::kBarrier) {
    reason = concat("rank ", rank, " sent what is no header of a call");
  } else if (header.number != call.number) {
    reason = concat("rank ", rank, " is in call ", header.number, " but rank ", rank_, " in call ",
                    call.number);
  } else if (header.kind != call.kind) {
    const Kind lower = rank < rank_ ? header.kind : call.kind;
    reason =
        concat("rank ", std::min(rank, rank_), " called ", name_of(lower == Kind::kBarrier),
               " but rank ", std::max(rank, rank_), " called ", name_of(lower != Kind::kBarrier));
  } else if (header.sent_bytes != expected) {
    reason = concat("rank ", rank, " sends ", header.sent_bytes, " bytes to rank ", rank_,
                    ", which expects ", expected);
  } else if (header.expected_bytes != sent) {
    reason = concat("rank ", rank_, " sends ", sent, " bytes to rank ", rank, ", which expects ",
                    header.expected_bytes);
  } else {
    return;
  }
  declare(ErrorCode::kPeerMismatch, reason, call.number - 1);
}

std::vector<pollfd> TcpCommunicator::interests(const Call& call) const {
  std::vector<pollfd> waiting{{wake_.fd(), POLLIN, 0}};
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_) continue;
    const Peer& with = peer(rank);
    if (!with.control_closed) waiting.push_back({with.link.control.fd(), POLLIN, 0});
    if (with.calls_closed || is_complete(call, rank)) continue;
    short events = 0;
    if (with.bytes_in < sizeof(Header) + call.in(rank).size()) events |= POLLIN;
    if (with.bytes_out < sizeof(Header) + call.out(rank).size()) events |= POLLOUT;
    waiting.push_back({with.link.calls.fd(), events, 0});
  }
  return waiting;
}

void TcpCommunicator::wait(const std::vector<pollfd>& interests, Deadline deadline) const {
  std::vector<pollfd> waiting = interests;
  poll(waiting.data(), waiting.size(), poll_timeout(deadline, kLongestPoll));
}

// --- faults ---

void TcpCommunicator::find_departures(const Call& call) {
  std::vector<int> left;
  std::vector<int> lost;
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_ || is_complete(call, rank)) continue;
    // NOTE: the two connections close one after the other, and only the control connection says
    // why.
    if (!peer(rank).calls_closed || !peer(rank).control_closed) continue;
    (peer(rank).has_left ? left : lost).push_back(rank);
  }
  if (left.empty() && lost.empty()) return;
  std::string text;
  if (!left.empty()) text = concat(name_ranks(left), " left the group");
  if (!left.empty() && !lost.empty()) text += " and ";
  if (!lost.empty()) {
    text += concat(name_ranks(lost), lost.size() == 1 ? " is lost: its" : " are lost: their",
                   " connection was closed");
  }
  declare(ErrorCode::kPeerLost, text, call.number - 1);
}

void TcpCommunicator::declare_late(const Call& call, Timeout timeout) {
  std::vector<int> absent;
  std::vector<int> stalled;
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_ || is_complete(call, rank)) continue;
    (peer(rank).has_arrived() ? stalled : absent).push_back(rank);
  }
  std::string text;
  if (!absent.empty()) text = concat(name_ranks(absent), " did not arrive");
  if (!absent.empty() && !stalled.empty()) text += " and ";
  if (!stalled.empty()) text += concat(name_ranks(stalled), " stopped in the middle");
  declare(ErrorCode::kPeerLost,
          concat(text, " in call ", call.number, " (", name_of(call.kind == Kind::kBarrier),
                 ") within ", timeout.count(), " ms, as rank ", rank_, " found"),
          call.number - 1);
}

void TcpCommunicator::throw_fault(const Call& call) const {
  DISTMOE_CHECK(fault_.has_value(), kInternal, "a call ended without a fault");
  throw_error(fault_->code,
              concat("rank ", rank_, " of ", size(), ", call ", call.number, " (",
                     name_of(call.kind == Kind::kBarrier), ") of the tcp group: ", fault_->reason));
}

void TcpCommunicator::declare(ErrorCode code, const std::string& reason,
                              std::uint64_t completed_calls) {
  if (fault_ && fault_->completed_calls <= completed_calls) return;
  fault_ = Fault{code, reason, completed_calls};
  Control control{.message = Message::kFault,
                  .code = static_cast<std::int32_t>(code),
                  .completed_calls = completed_calls,
                  .length = std::min(reason.size(), sizeof(Control::text))};
  std::memcpy(control.text, reason.data(), control.length);
  tell_peers(control);
}

// --- control messages ---

void TcpCommunicator::tell_peers(const Control& control) {
  // NOTE: a rank sends two of these at most, which any socket's buffer holds; a peer that cannot be
  // told finds out through the closed connection or its timeout.
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != rank_) send_some(peer(rank).link.control, std::as_bytes(std::span(&control, 1)));
  }
}

void TcpCommunicator::read_control() {
  for (int rank = 0; rank < size(); ++rank) {
    Peer& from = peer(rank);
    while (rank != rank_ && !from.control_closed) {
      const auto place = std::as_writable_bytes(std::span(&from.control, 1));
      const Transfer received = receive_some(from.link.control, place.subspan(from.control_bytes));
      from.control_bytes += received.bytes;
      from.control_closed = received.is_closed;
      if (from.control_bytes < sizeof(Control)) break;
      from.control_bytes = 0;
      if (from.control.message == Message::kLeft) from.has_left = true;
      take(from.control);
    }
  }
}

void TcpCommunicator::take(const Control& control) {
  if (control.message != Message::kFault) return;
  if (fault_ && fault_->completed_calls <= control.completed_calls) return;
  // The peers are told by the rank that found it.
  const bool is_mismatch = control.code == static_cast<std::int32_t>(ErrorCode::kPeerMismatch);
  fault_ =
      Fault{is_mismatch ? ErrorCode::kPeerMismatch : ErrorCode::kPeerLost,
            std::string(control.text, std::min<std::size_t>(control.length, sizeof(control.text))),
            control.completed_calls};
}

}  // namespace distmoe::tcp

namespace distmoe {

std::shared_ptr<Communicator> make_tcp_communicator(const TcpGroup& group,
                                                    Communicator::Timeout timeout) {
  DISTMOE_CHECK(group.size >= 1, kInvalidArgument, "a tcp group has ", group.size,
                " ranks; legal: 1 or more");
  DISTMOE_CHECK(group.rank >= 0 && group.rank < group.size, kInvalidArgument, "rank ", group.rank,
                " of a tcp group of ", group.size, "; legal: 0..", group.size - 1);
  DISTMOE_CHECK(group.size == 1 || (group.port >= 1 && group.port <= 65535), kInvalidArgument,
                "the port of a tcp group is ", group.port, "; legal: 1..65535");
  std::vector<tcp::Link> links(1);
  if (group.size > 1) links = tcp::connect_ranks(group, timeout);
  return std::make_shared<tcp::TcpCommunicator>(group, std::move(links));
}

}  // namespace distmoe
