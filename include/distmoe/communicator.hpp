// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "distmoe/export.hpp"

namespace distmoe {

/// Memory that every rank of a group allocated alike and that peers can address where the hardware
/// allows: on CUDA device memory. Optional: the CPU backend never asks for it, and ranks that are
/// threads of one process need none.
class DISTMOE_EXPORT SymmetricMemory {
 public:
  virtual ~SymmetricMemory();
  /// Collective. Returns this rank's base address of a new allocation of `bytes`, or throws on
  /// every rank.
  virtual void* allocate(std::size_t bytes) = 0;
  /// Frees what allocate() returned. Every rank does it, and none waits for another.
  virtual void free(void* base) = 0;
  /// The address of rank `peer`'s copy of the allocation `base`, or null where it is not visible.
  virtual void* peer_pointer(void* base, int peer) = 0;
};

/// The ranks of an expert-parallel group. Implement it to run distmoe over a transport of your own;
/// the CPU backend needs rank, size, alltoallv, barrier and abort.
///
/// One thread uses a communicator at a time. Every rank makes the same calls in the same order.
/// Calls throw Error(peer_lost), naming the missing ranks, when a peer has not arrived within
/// `timeout`, left the group or called abort, and Error(peer_mismatch) when ranks disagree about
/// the call; after either, only abort() and destruction are valid. Destruction waits for nobody.
class DISTMOE_EXPORT Communicator {
 public:
  using Timeout = std::chrono::milliseconds;

  virtual ~Communicator();
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  /// A short lower-case name of the transport, for reports: "threads", "mpi", "tcp", "nccl".
  virtual std::string_view name() const noexcept = 0;

  /// Sends send[p] to every rank p and receives recv[p] from it; the length of send[p] here equals
  /// the length of recv[rank()] there. Both spans have size() entries; entries of length 0 may have
  /// null data; the entry of this rank itself is copied. Buffers do not overlap. On return the send
  /// buffers may be written again; after an error the contents of recv are unspecified.
  virtual void alltoallv(std::span<const std::span<const std::byte>> send,
                         std::span<const std::span<std::byte>> recv, Timeout timeout) = 0;
  /// Returns when every rank has entered.
  virtual void barrier(Timeout timeout) = 0;
  /// Tells the peers, as well as the transport can, that this rank gives up: they get peer_lost
  /// with `reason` instead of waiting. Never waits, never throws; idempotent.
  virtual void abort(std::string_view reason) noexcept = 0;
  /// Null where the transport has none.
  virtual SymmetricMemory* symmetric_memory() noexcept { return nullptr; }
};

/// A group of `size` ranks that are threads of this process: element r is for rank r's thread. A
/// communicator that is destroyed while peers still wait for it gives them peer_lost at once.
DISTMOE_EXPORT std::vector<std::shared_ptr<Communicator>> make_thread_group(int size);

/// Runs `body(communicator)` on `size` threads, one a rank, and joins them. A rank whose body
/// throws aborts with the words of its exception, so that its peers get peer_lost at once; the
/// exception that is no such consequence is rethrown, that of the lowest rank where there are
/// several. A body that returns has left the group, whoever still holds its communicator. Throws
/// out_of_memory where not every thread could be started.
DISTMOE_EXPORT void run_thread_group(
    int size, const std::function<void(std::shared_ptr<Communicator>)>& body);

/// The ranks of MPI_COMM_WORLD (one process a rank; the group gets its own duplicate). Initialises
/// MPI where nobody has; whoever initialised it finalises it (this library at process exit, unless
/// there was a fault: then the process leaves without MPI_Finalize, and no further communicator is
/// made). Throws unsupported where this build or machine has no MPI. Collective; may be called
/// again.
DISTMOE_EXPORT std::shared_ptr<Communicator> make_mpi_communicator();

/// Where the ranks of a TCP group meet.
struct TcpGroup {
  int rank = 0;
  int size = 1;
  std::string host;  ///< of rank 0, as all ranks know it
  int port = 0;      ///< at which rank 0 listens while the group is made
  std::string job;   ///< the same on all ranks; keeps those of another job out
};

/// The group of a process that torchrun started: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT + 1 and
/// TORCHELASTIC_RUN_ID. Throws invalid_argument, naming the variable, where one is missing.
DISTMOE_EXPORT TcpGroup torchrun_group();

/// Ranks that are processes, connected by TCP without encryption or authentication. Collective:
/// throws peer_lost, naming who is missing, where not all came within `timeout`.
DISTMOE_EXPORT std::shared_ptr<Communicator> make_tcp_communicator(const TcpGroup& group,
                                                                   Communicator::Timeout timeout);

/// Adds symmetric memory of GPUs to `host`, which carries all calls: what a CUDA context needs
/// whose ranks are processes, one a GPU. `device` is the CUDA ordinal of this rank, and the device
/// of its contexts. NCCL 2.28 or later is loaded at run time (docs/communication.md says from
/// where). Collective; throws unsupported on every rank where NCCL or a GPU is missing or two ranks
/// have the same GPU. NCCL's own waits are bounded by `timeout` too.
DISTMOE_EXPORT std::shared_ptr<Communicator> make_nccl_communicator(
    std::shared_ptr<Communicator> host, int device, Communicator::Timeout timeout);

}  // namespace distmoe
