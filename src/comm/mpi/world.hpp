// SPDX-License-Identifier: Apache-2.0
//
// What all MPI communicators of a process share: the duplicate of MPI_COMM_WORLD, the control
// messages between ranks, the one fault, and leaving MPI at process exit.
//
// A control message is one small eager message on a tag of its own. Receives for it are always
// posted while a communicator lives, and are looked at whenever a rank waits. The first fault ends
// MPI for this process: no MPI call follows it, MPI_Finalize included, because any may wait for a
// peer that is gone.
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "distmoe/error.hpp"

namespace distmoe::mpi {

/// Ids of the communicators of a process count from 1; creation is collective, so that all ranks
/// agree on them.
using CommunicatorId = std::uint64_t;

/// How far the rank that found a fault had come: what it completed before completes everywhere.
struct Position {
  CommunicatorId id;
  std::uint64_t completed_calls;
};

struct Fault {
  ErrorCode code;
  std::string reason;
  Position origin;
};

class World {
 public:
  /// Collective at first use: initialises MPI where nobody has, and duplicates MPI_COMM_WORLD.
  static World& instance();

  World(const World&) = delete;
  World& operator=(const World&) = delete;
  /// Never destroyed: MPI may touch its buffers, and communicators its state, until the end.
  ~World() = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  MPI_Comm handle() const noexcept { return handle_; }
  /// Held during every use of this object and of MPI: two communicators may serve two threads.
  std::mutex& mutex() noexcept { return mutex_; }
  /// Throws unsupported where MPI's thread level keeps this thread from calling it.
  void check_thread() const;

  CommunicatorId open();
  /// Tells nobody from a thread that may not call MPI; the same holds for declare().
  void close(CommunicatorId id);

  const std::optional<Fault>& fault() const noexcept { return fault_; }
  /// Whether the fault ends call `number` of communicator `id`. A rank that completed a call has
  /// heard from all others in it, so that a fault it found later leaves that call alone.
  bool is_ended(CommunicatorId id, std::uint64_t number) const;
  /// False after a fault, and where the program has finalised MPI.
  bool is_usable() const;
  /// Sets the fault, where there is none, and tells the peers.
  void declare(ErrorCode code, const std::string& reason, const Position& origin);
  /// Whether `peer` will never enter another call of communicator `id`.
  bool has_left(CommunicatorId id, int peer) const;
  /// Takes in the control messages that arrived. Sets fault().
  void poll();
  /// Remembers how long a caller was willing to wait; leaving MPI waits no longer.
  void note_patience(std::chrono::milliseconds timeout);
  /// Keeps memory that MPI may still touch after a fault.
  void retain(std::shared_ptr<void> memory) { retained_.push_back(std::move(memory)); }

 private:
  enum class Kind : std::uint32_t { kFault, kLeft, kExit };

  struct Control {
    Kind kind;
    ErrorCode code;
    Position origin;
    std::uint64_t length;
    char text[480];
  };

  struct Outgoing {
    Control control{};
    std::vector<MPI_Request> requests;
  };

  World();
  /// Below MPI_THREAD_SERIALIZED only the thread that initialised MPI may call it.
  bool may_call() const;
  static void leave_at_exit();
  void leave();
  bool await_exits();

  void send(Kind kind, const Position& origin, ErrorCode code, std::string_view text);
  void receive(int peer);
  void post_receive(int peer);
  void cancel_receives();

  std::mutex mutex_;
  MPI_Comm handle_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  bool has_initialised_ = false;
  int thread_level_ = MPI_THREAD_SINGLE;
  std::chrono::milliseconds patience_{0};
  std::optional<Fault> fault_;
  CommunicatorId last_id_ = 0;
  std::set<CommunicatorId> open_;
  std::map<CommunicatorId, std::set<int>> left_;  // of communicators that are not closed here
  std::set<int> exited_;
  std::vector<MPI_Request> receives_;  // one a peer; this rank's own stays null
  std::vector<Control> incoming_;
  std::list<Outgoing> outgoing_;
  std::vector<std::shared_ptr<void>> retained_;
};

/// The words of an MPI error code.
std::string error_text(int code);

}  // namespace distmoe::mpi
