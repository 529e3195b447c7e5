// SPDX-License-Identifier: Apache-2.0
//
// One collective call over MPI: who sends what.
//
// Every rank sends a header to every peer: which call this is, how many bytes follow and how many
// it expects back, so that both sides of a pair see a disagreement before any byte of data is
// received. Data follows in chunks of at most 1 GiB. A barrier is headers alone. Everything is
// nonblocking and polled until all of it is done, the deadline has passed, or a control message
// says that it never will be.
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/exchange.hpp"
#include "comm/mpi/world.hpp"

namespace distmoe::mpi {

enum class CallKind : std::uint64_t { kAlltoallv, kBarrier };

struct CallId {
  CommunicatorId communicator;
  std::uint64_t number;  // from 1
  CallKind kind;
};

class ExchangeCall {
 public:
  /// The spans are empty for a barrier.
  ExchangeCall(World& world, const CallId& id, SendSpans send, RecvSpans recv);

  /// Throws peer_lost or peer_mismatch, after which the world has a fault and `call` is retained.
  static void run(const std::shared_ptr<ExchangeCall>& call, std::chrono::milliseconds timeout);

 private:
  struct Header {
    CommunicatorId communicator;
    std::uint64_t number;
    CallKind kind;
    std::uint64_t sent_bytes;
    std::uint64_t expected_bytes;
  };

  enum class PartKind : std::uint8_t { kHeaderOut, kHeaderIn, kDataOut, kDataIn };

  /// What request of the same index transfers.
  struct Part {
    PartKind kind;
    int peer;
  };

  void post_all();
  void post_data_receives(int peer);
  void add(PartKind kind, int peer, int code, MPI_Request request);
  /// Takes in what is complete; whether there was anything.
  bool progress();
  void complete(std::size_t index);
  void check_header(int peer);
  bool poll_once(std::chrono::steady_clock::time_point deadline, std::chrono::milliseconds timeout);
  bool is_ended() const { return world_.is_ended(id_.communicator, id_.number); }
  bool is_complete() const { return num_pending_ == 0 && !has_failed_ && !is_ended(); }
  [[noreturn]] void throw_fault() const;
  void fail(ErrorCode code, const std::string& reason);
  void find_departures();
  void declare_late(std::chrono::milliseconds timeout);
  void declare_error(int peer, int code);
  void cancel_receives();
  std::uint64_t sent_bytes(int peer) const;
  std::uint64_t expected_bytes(int peer) const;
  std::string call_name() const;

  World& world_;
  CallId id_;
  SendSpans send_;
  RecvSpans recv_;
  std::vector<Header> headers_out_;
  std::vector<Header> headers_in_;
  std::vector<bool> has_arrived_;
  std::vector<MPI_Request> requests_;
  std::vector<Part> parts_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::size_t num_pending_ = 0;
  bool has_failed_ = false;  // this call itself, not one of a peer
};

}  // namespace distmoe::mpi
