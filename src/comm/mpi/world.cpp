// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/world.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "comm/exchange.hpp"
#include "comm/mpi/backoff.hpp"
#include "comm/mpi/tags.hpp"
#include "core/check.hpp"

namespace distmoe::mpi {

namespace {

/// How long leaving waits for peers where no call ever said how patient it is.
constexpr std::chrono::milliseconds kDefaultPatience{300'000};

const char* level_name(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE: return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED: return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED: return "MPI_THREAD_SERIALIZED";
    default: return "MPI_THREAD_MULTIPLE";
  }
}

void check_call(int code, const char* what) {
  DISTMOE_CHECK(code == MPI_SUCCESS, kUnsupported, what, " failed: ", error_text(code));
}

}  // namespace

std::string error_text(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return concat("MPI error ", code);
  return std::string(text, static_cast<std::size_t>(length));
}

World& World::instance() {
  static World* const world = new World();
  return *world;
}

World::World() {
  int is_done = 0;
  MPI_Finalized(&is_done);
  DISTMOE_CHECK(is_done == 0, kUnsupported, "MPI was already finalised in this process");
  int is_initialised = 0;
  MPI_Initialized(&is_initialised);
  if (is_initialised == 0) {
    check_call(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &thread_level_),
               "MPI_Init_thread");
    has_initialised_ = true;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  } else {
    check_call(MPI_Query_thread(&thread_level_), "MPI_Query_thread");
    check_thread();
  }
  check_call(MPI_Comm_dup(MPI_COMM_WORLD, &handle_), "MPI_Comm_dup");
  MPI_Comm_set_errhandler(handle_, MPI_ERRORS_RETURN);
  MPI_Comm_rank(handle_, &rank_);
  MPI_Comm_size(handle_, &size_);
  receives_.assign(static_cast<std::size_t>(size_), MPI_REQUEST_NULL);
  incoming_.resize(static_cast<std::size_t>(size_));
  std::atexit(leave_at_exit);
}

bool World::may_call() const {
  // MPI keeps the levels in this order.
  if (thread_level_ >= MPI_THREAD_SERIALIZED) return true;
  int is_main = 0;
  return MPI_Is_thread_main(&is_main) == MPI_SUCCESS && is_main != 0;
}

void World::check_thread() const {
  DISTMOE_CHECK(may_call(), kUnsupported, "MPI was initialised with ", level_name(thread_level_),
                ", which lets only the thread that initialised it call it; this is another one, "
                "which needs MPI_Init_thread with MPI_THREAD_SERIALIZED or more");
}

CommunicatorId World::open() {
  const std::lock_guard lock(mutex_);
  check_thread();
  if (fault_) {
    throw_error(fault_->code,
                concat("no MPI communicator can be made after a fault: ", fault_->reason));
  }
  DISTMOE_CHECK(is_usable(), kUnsupported, "MPI was already finalised in this process");
  if (open_.empty()) {
    for (int peer = 0; peer < size_; ++peer) post_receive(peer);
  }
  open_.insert(++last_id_);
  poll();
  return last_id_;
}

void World::close(CommunicatorId id) {
  const std::lock_guard lock(mutex_);
  open_.erase(id);
  left_.erase(id);
  if (!is_usable() || !may_call()) return;
  send(Kind::kLeft, {id, 0}, ErrorCode::kPeerLost, "");
  poll();
  // A program that owns MPI may finalise it from here on; nothing of ours is left posted.
  if (open_.empty() && !has_initialised_) cancel_receives();
}

bool World::is_ended(CommunicatorId id, std::uint64_t number) const {
  return fault_ && !(fault_->origin.id == id && fault_->origin.completed_calls >= number);
}

void World::declare(ErrorCode code, const std::string& reason, const Position& origin) {
  if (fault_ || !is_usable()) return;
  if (may_call()) send(Kind::kFault, origin, code, reason);
  fault_ = Fault{code, reason, origin};
  if (!may_call()) return;
  // Best effort: gives the messages a chance to leave before this process does; never waits.
  for (int attempt = 0; attempt < 64 && !outgoing_.empty(); ++attempt) {
    auto& requests = outgoing_.back().requests;
    int is_done = 0;
    const int code_of_test = MPI_Testall(static_cast<int>(requests.size()), requests.data(),
                                         &is_done, MPI_STATUSES_IGNORE);
    if (is_done != 0 || code_of_test != MPI_SUCCESS) break;
  }
}

bool World::has_left(CommunicatorId id, int peer) const {
  const auto left = left_.find(id);
  return exited_.contains(peer) || (left != left_.end() && left->second.contains(peer));
}

void World::note_patience(std::chrono::milliseconds timeout) {
  patience_ = std::max(patience_, timeout);
}

bool World::is_usable() const {
  int is_done = 0;
  MPI_Finalized(&is_done);
  return is_done == 0 && !fault_;
}

// --- control messages ---

void World::send(Kind kind, const Position& origin, ErrorCode code, std::string_view text) {
  Outgoing& message = outgoing_.emplace_back();
  message.control = Control{kind, code, origin, std::min(text.size(), sizeof(Control::text)), {}};
  std::memcpy(message.control.text, text.data(), message.control.length);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    MPI_Request& request = message.requests.emplace_back(MPI_REQUEST_NULL);
    // A peer that cannot be reached is a peer that need not be told.
    if (MPI_Isend(&message.control, sizeof(Control), MPI_BYTE, peer, kControlTag, handle_,
                  &request) != MPI_SUCCESS) {
      request = MPI_REQUEST_NULL;
    }
  }
}

void World::post_receive(int peer) {
  const auto slot = static_cast<std::size_t>(peer);
  if (peer == rank_ || receives_[slot] != MPI_REQUEST_NULL) return;
  if (MPI_Irecv(&incoming_[slot], sizeof(Control), MPI_BYTE, peer, kControlTag, handle_,
                &receives_[slot]) != MPI_SUCCESS) {
    receives_[slot] = MPI_REQUEST_NULL;
  }
}

void World::cancel_receives() {
  for (int peer = 0; peer < size_; ++peer) {
    MPI_Request& request = receives_[static_cast<std::size_t>(peer)];
    if (request == MPI_REQUEST_NULL) continue;
    MPI_Cancel(&request);
    int is_done = 0;
    int is_cancelled = 0;
    MPI_Status status;
    MPI_Test(&request, &is_done, &status);
    if (is_done == 0) MPI_Request_free(&request);
    request = MPI_REQUEST_NULL;
    if (is_done == 0 || MPI_Test_cancelled(&status, &is_cancelled) != MPI_SUCCESS) continue;
    if (is_cancelled == 0) receive(peer);
  }
}

void World::poll() {
  if (!is_usable()) return;
  for (int peer = 0; peer < size_ && !fault_; ++peer) {
    const auto slot = static_cast<std::size_t>(peer);
    int is_done = receives_[slot] != MPI_REQUEST_NULL ? 1 : 0;
    while (is_done != 0 && receives_[slot] != MPI_REQUEST_NULL && !fault_) {
      const int code = MPI_Test(&receives_[slot], &is_done, MPI_STATUS_IGNORE);
      if (code != MPI_SUCCESS) {
        declare(ErrorCode::kPeerLost, concat("rank ", peer, " is lost: ", error_text(code)), {});
      } else if (is_done != 0) {
        receive(peer);
        post_receive(peer);
      }
    }
  }
  std::erase_if(outgoing_, [](Outgoing& message) {
    int is_done = 0;
    MPI_Testall(static_cast<int>(message.requests.size()), message.requests.data(), &is_done,
                MPI_STATUSES_IGNORE);
    return is_done != 0;
  });
}

void World::receive(int peer) {
  const Control& control = incoming_[static_cast<std::size_t>(peer)];
  const CommunicatorId id = control.origin.id;
  switch (control.kind) {
    case Kind::kFault:
      // The peers are told by the rank that found it.
      fault_ = Fault{control.code, std::string(control.text, control.length), control.origin};
      break;
    case Kind::kLeft:
      // A peer may be ahead and close what is still to be opened here, or behind.
      if (id > last_id_ || open_.contains(id)) left_[id].insert(peer);
      break;
    case Kind::kExit: exited_.insert(peer); break;
  }
}

// --- leaving ---

void World::leave_at_exit() { instance().leave(); }

void World::leave() {
  const std::lock_guard lock(mutex_);
  if (!is_usable() || !may_call()) return;
  send(Kind::kExit, {}, ErrorCode::kPeerLost, "");
  if (!has_initialised_) return;
  if (await_exits()) MPI_Finalize();
}

/// MPI_Finalize waits for all ranks without limit, so it is called once all are known to be there.
bool World::await_exits() {
  for (int peer = 0; peer < size_; ++peer) post_receive(peer);
  const auto deadline = deadline_after(patience_.count() > 0 ? patience_ : kDefaultPatience);
  Backoff backoff;
  while (static_cast<int>(exited_.size()) < size_ - 1 || !outgoing_.empty()) {
    poll();
    if (fault_ || std::chrono::steady_clock::now() > deadline) return false;
    backoff.pause();
  }
  cancel_receives();
  return true;
}

}  // namespace distmoe::mpi
