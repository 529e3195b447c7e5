// SPDX-License-Identifier: Apache-2.0
//
// A communicator over TCP: every pair of ranks has a connection for calls and one for control
// messages.
//
// In a call every rank sends each peer a header (number and kind of the call, bytes sent, bytes
// expected) and then its data; a barrier is headers alone. A header that does not fit is a
// peer_mismatch before any byte of data is taken. A control message says that a rank left or found
// a fault; the kernel itself says, by closing connections, that a process ended.
#pragma once

#include <poll.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/exchange.hpp"
#include "comm/tcp/rendezvous.hpp"
#include "distmoe/communicator.hpp"
#include "distmoe/error.hpp"

namespace distmoe::tcp {

class TcpCommunicator final : public Communicator {
 public:
  TcpCommunicator(const TcpGroup& group, std::vector<Link> links);
  TcpCommunicator(const TcpCommunicator&) = delete;
  TcpCommunicator& operator=(const TcpCommunicator&) = delete;
  ~TcpCommunicator() override;

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return static_cast<int>(peers_.size()); }
  std::string_view name() const noexcept override { return "tcp"; }

  void alltoallv(SendSpans send, RecvSpans recv, Timeout timeout) override;
  void barrier(Timeout timeout) override;
  void abort(std::string_view reason) noexcept override;

 private:
  enum class Kind : std::uint64_t { kAlltoallv, kBarrier };

  struct Header {
    std::uint64_t number = 0;
    Kind kind = Kind::kBarrier;
    std::uint64_t sent_bytes = 0;
    std::uint64_t expected_bytes = 0;
  };

  enum class Message : std::uint32_t { kLeft, kFault };

  struct Control {
    Message message = Message::kLeft;
    std::int32_t code = 0;
    std::uint64_t completed_calls = 0;  ///< of the rank that found the fault
    std::uint64_t length = 0;
    char text[488] = {};
  };

  struct Fault {
    ErrorCode code;
    std::string reason;
    std::uint64_t completed_calls;
  };

  struct Peer {
    Link link;
    bool has_left = false;  ///< said so
    bool control_closed = false;
    bool calls_closed = false;
    Control control;  ///< comes in
    std::size_t control_bytes = 0;
    // Of the current call.
    Header header_out;
    Header header_in;
    std::size_t bytes_out = 0;  ///< header and data
    std::size_t bytes_in = 0;

    bool has_arrived() const { return bytes_in >= sizeof(Header); }
  };

  struct Call {
    std::uint64_t number;
    Kind kind;
    SendSpans send;
    RecvSpans recv;

    std::span<const std::byte> out(int peer) const {
      return send.empty() ? std::span<const std::byte>() : send[static_cast<std::size_t>(peer)];
    }
    std::span<std::byte> in(int peer) const {
      return recv.empty() ? std::span<std::byte>() : recv[static_cast<std::size_t>(peer)];
    }
  };

  void run(Kind kind, SendSpans send, RecvSpans recv, Timeout timeout);
  void begin(const Call& call);
  /// Moves what can be moved; whether the call is complete.
  bool advance(const Call& call);
  void send_to(const Call& call, int rank);
  void receive_from(const Call& call, int rank);
  void check_header(const Call& call, int rank);
  bool is_complete(const Call& call, int rank) const;
  void find_departures(const Call& call);
  void declare_late(const Call& call, Timeout timeout);
  /// Until something can move; the lock is not held.
  void wait(const std::vector<pollfd>& interests, Deadline deadline) const;
  std::vector<pollfd> interests(const Call& call) const;

  void read_control();
  void take(const Control& control);
  void tell_peers(const Control& control);
  /// Sets the fault, where there is none of an earlier call, and tells the peers.
  void declare(ErrorCode code, const std::string& reason, std::uint64_t completed_calls);
  bool is_ended(const Call& call) const { return fault_ && fault_->completed_calls < call.number; }
  [[noreturn]] void throw_fault(const Call& call) const;

  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }

  std::mutex mutex_;  ///< of everything below: abort() may come from another thread
  const int rank_;
  std::vector<Peer> peers_;
  Socket wake_;  ///< an eventfd that abort() writes
  std::optional<Fault> fault_;
  std::uint64_t num_calls_ = 0;
  std::uint64_t num_completed_ = 0;
};

}  // namespace distmoe::tcp
