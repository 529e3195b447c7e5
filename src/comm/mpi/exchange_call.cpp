// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/exchange_call.hpp"

#include <algorithm>
#include <optional>

#include "comm/chunks.hpp"
#include "comm/mpi/backoff.hpp"
#include "comm/mpi/tags.hpp"
#include "core/check.hpp"

namespace distmoe::mpi {

namespace {

const char* to_string(CallKind kind) {
  return kind == CallKind::kAlltoallv ? "alltoallv" : "barrier";
}

}  // namespace

ExchangeCall::ExchangeCall(World& world, const CallId& id, SendSpans send, RecvSpans recv)
    : world_(world), id_(id), send_(send), recv_(recv) {
  const auto size = static_cast<std::size_t>(world.size());
  headers_out_.resize(size);
  headers_in_.resize(size);
  has_arrived_.resize(size);
}

void ExchangeCall::run(const std::shared_ptr<ExchangeCall>& call,
                       std::chrono::milliseconds timeout) {
  const auto deadline = deadline_after(timeout);
  World& world = call->world_;
  {
    const std::lock_guard lock(world.mutex());
    if (world.fault()) call->throw_fault();
    call->post_all();
  }
  Backoff backoff;
  for (;;) {
    {
      const std::lock_guard lock(world.mutex());
      if (call->poll_once(deadline, timeout)) backoff.reset();
      if (call->is_complete()) return;
      if (call->has_failed_ || call->is_ended()) {
        call->cancel_receives();
        world.retain(call);
        call->throw_fault();
      }
    }
    backoff.pause();
  }
}

void ExchangeCall::throw_fault() const {
  const std::optional<Fault>& fault = world_.fault();
  DISTMOE_CHECK(fault.has_value(), kInternal, "a call ended without a fault");
  throw_error(fault->code, concat("rank ", world_.rank(), " of ", world_.size(), ", ", call_name(),
                                  " of the mpi group: ", fault->reason));
}

std::string ExchangeCall::call_name() const {
  return concat("call ", id_.number, " (", to_string(id_.kind), ")");
}

std::uint64_t ExchangeCall::sent_bytes(int peer) const {
  return send_.empty() ? 0 : send_[static_cast<std::size_t>(peer)].size();
}

std::uint64_t ExchangeCall::expected_bytes(int peer) const {
  return recv_.empty() ? 0 : recv_[static_cast<std::size_t>(peer)].size();
}

// --- posting ---

void ExchangeCall::add(PartKind kind, int peer, int code, MPI_Request request) {
  if (code != MPI_SUCCESS) {
    declare_error(peer, code);
    return;
  }
  requests_.push_back(request);
  parts_.push_back({kind, peer});
  ++num_pending_;
}

void ExchangeCall::post_all() {
  const CallTags tags = tags_of(id_.communicator, id_.number);
  const int size = world_.size();
  for (int step = 1; step < size && !has_failed_; ++step) {
    const int peer = (world_.rank() + step) % size;
    const auto slot = static_cast<std::size_t>(peer);
    MPI_Request request = MPI_REQUEST_NULL;
    int code = MPI_Irecv(&headers_in_[slot], sizeof(Header), MPI_BYTE, peer, tags.header,
                         world_.handle(), &request);
    add(PartKind::kHeaderIn, peer, code, request);
    headers_out_[slot] = {id_.communicator, id_.number, id_.kind, sent_bytes(peer),
                          expected_bytes(peer)};
    code = MPI_Isend(&headers_out_[slot], sizeof(Header), MPI_BYTE, peer, tags.header,
                     world_.handle(), &request);
    add(PartKind::kHeaderOut, peer, code, request);
  }
  for (int step = 1; step < size && !has_failed_; ++step) {
    const int peer = (world_.rank() + step) % size;
    for (std::uint64_t i = 0; i < num_chunks(sent_bytes(peer)); ++i) {
      const Chunk chunk = chunk_at(sent_bytes(peer), i);
      MPI_Request request = MPI_REQUEST_NULL;
      const int code = MPI_Isend(send_[static_cast<std::size_t>(peer)].data() + chunk.offset,
                                 chunk.bytes, MPI_BYTE, peer, tags.data, world_.handle(), &request);
      add(PartKind::kDataOut, peer, code, request);
    }
  }
}

void ExchangeCall::post_data_receives(int peer) {
  const int tag = tags_of(id_.communicator, id_.number).data;
  for (std::uint64_t i = 0; i < num_chunks(expected_bytes(peer)); ++i) {
    const Chunk chunk = chunk_at(expected_bytes(peer), i);
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = MPI_Irecv(recv_[static_cast<std::size_t>(peer)].data() + chunk.offset,
                               chunk.bytes, MPI_BYTE, peer, tag, world_.handle(), &request);
    add(PartKind::kDataIn, peer, code, request);
  }
}

// --- progress ---

bool ExchangeCall::poll_once(std::chrono::steady_clock::time_point deadline,
                             std::chrono::milliseconds timeout) {
  const bool is_late = std::chrono::steady_clock::now() >= deadline;
  // NOTE: control messages are read before the data they may have overtaken, so that a departure
  // counts only where the peer's header is truly missing.
  if (num_pending_ > 0) world_.poll();
  bool has_moved = false;
  while (num_pending_ > 0 && !has_failed_ && progress()) has_moved = true;
  if (num_pending_ == 0 || has_failed_ || is_ended()) return has_moved;
  find_departures();
  if (is_late && !has_moved) declare_late(timeout);
  return has_moved;
}

bool ExchangeCall::progress() {
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int num_done = 0;
  const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &num_done,
                                indices_.data(), statuses_.data());
  if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) {
    declare_error(-1, code);
    return false;
  }
  if (num_done == MPI_UNDEFINED || num_done <= 0) return false;
  for (std::size_t i = 0; i < static_cast<std::size_t>(num_done); ++i) {
    const auto index = static_cast<std::size_t>(indices_[i]);
    --num_pending_;
    if (code == MPI_ERR_IN_STATUS && statuses_[i].MPI_ERROR != MPI_SUCCESS) {
      declare_error(parts_[index].peer, statuses_[i].MPI_ERROR);
    } else {
      complete(index);
    }
  }
  return true;
}

void ExchangeCall::complete(std::size_t index) {
  const Part part = parts_[index];
  if (part.kind != PartKind::kHeaderIn) return;
  has_arrived_[static_cast<std::size_t>(part.peer)] = true;
  check_header(part.peer);
  if (!has_failed_) post_data_receives(part.peer);
}

void ExchangeCall::check_header(int peer) {
  const Header& header = headers_in_[static_cast<std::size_t>(peer)];
  const int own = world_.rank();
  if (header.communicator != id_.communicator || header.number != id_.number) {
    fail(ErrorCode::kPeerMismatch,
         concat("rank ", peer, " is in call ", header.number, " of communicator ",
                header.communicator, " but rank ", own, " in call ", id_.number,
                " of communicator ", id_.communicator));
  } else if (header.kind != id_.kind) {
    const auto lower = peer < own ? header.kind : id_.kind;
    const auto upper = peer < own ? id_.kind : header.kind;
    fail(ErrorCode::kPeerMismatch,
         concat("rank ", std::min(peer, own), " called ", to_string(lower), " but rank ",
                std::max(peer, own), " called ", to_string(upper)));
  } else if (header.sent_bytes != expected_bytes(peer)) {
    fail(ErrorCode::kPeerMismatch,
         concat("rank ", peer, " sends ", header.sent_bytes, " bytes to rank ", own,
                ", which expects ", expected_bytes(peer)));
  } else if (header.expected_bytes != sent_bytes(peer)) {
    fail(ErrorCode::kPeerMismatch,
         concat("rank ", own, " sends ", sent_bytes(peer), " bytes to rank ", peer,
                ", which expects ", header.expected_bytes));
  }
}

// --- faults ---

void ExchangeCall::fail(ErrorCode code, const std::string& reason) {
  has_failed_ = true;
  world_.declare(code, reason, {id_.communicator, id_.number - 1});
}

void ExchangeCall::find_departures() {
  std::vector<int> gone;
  for (int peer = 0; peer < world_.size(); ++peer) {
    if (peer == world_.rank() || has_arrived_[static_cast<std::size_t>(peer)]) continue;
    if (world_.has_left(id_.communicator, peer)) gone.push_back(peer);
  }
  if (gone.empty()) return;
  fail(ErrorCode::kPeerLost, concat(name_ranks(gone), " left the group"));
}

void ExchangeCall::declare_late(std::chrono::milliseconds timeout) {
  std::vector<int> absent;
  std::vector<int> stalled;
  for (int peer = 0; peer < world_.size(); ++peer) {
    bool is_pending = false;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      is_pending |= parts_[i].peer == peer && requests_[i] != MPI_REQUEST_NULL;
    }
    if (!is_pending) continue;
    (has_arrived_[static_cast<std::size_t>(peer)] ? stalled : absent).push_back(peer);
  }
  std::string text;
  if (!absent.empty()) text = concat(name_ranks(absent), " did not arrive");
  if (!absent.empty() && !stalled.empty()) text += " and ";
  if (!stalled.empty()) text += concat(name_ranks(stalled), " stopped in the middle");
  fail(ErrorCode::kPeerLost, concat(text, " in ", call_name(), " within ", timeout.count(),
                                    " ms, as rank ", world_.rank(), " found"));
}

void ExchangeCall::declare_error(int peer, int code) {
  int error_class = MPI_SUCCESS;
  MPI_Error_class(code, &error_class);
  const std::string who = peer < 0 ? "a rank" : concat("rank ", peer);
  if (error_class == MPI_ERR_TRUNCATE) {
    fail(ErrorCode::kPeerMismatch,
         concat(who, " sends more than rank ", world_.rank(), " expects"));
  } else {
    fail(ErrorCode::kPeerLost, concat(who, " is lost: ", error_text(code)));
  }
}

void ExchangeCall::cancel_receives() {
  // NOTE: the caller's buffers are gone once the exception is out. Receives that have no message
  // yet are taken back here; one that is under way cannot be, but moves only inside MPI calls, and
  // none follows a fault.
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    const bool is_receive =
        parts_[i].kind == PartKind::kHeaderIn || parts_[i].kind == PartKind::kDataIn;
    if (is_receive && requests_[i] != MPI_REQUEST_NULL) MPI_Cancel(&requests_[i]);
  }
}

}  // namespace distmoe::mpi
