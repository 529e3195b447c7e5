// SPDX-License-Identifier: Apache-2.0
//
// The MPI engine, and the one symbol that its module offers.
#include <atomic>
#include <new>
#include <string_view>

#include "comm/mpi/exchange_call.hpp"
#include "comm/mpi/world.hpp"
#include "comm/mpi_engine.hpp"
#include "core/check.hpp"

namespace distmoe::mpi {

namespace {

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator() : world_(World::instance()), id_(world_.open()) {}
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;
  ~MpiCommunicator() override { world_.close(id_); }

  int rank() const noexcept override { return world_.rank(); }
  int size() const noexcept override { return world_.size(); }
  std::string_view name() const noexcept override { return "mpi"; }

  void alltoallv(SendSpans send, RecvSpans recv, Timeout timeout) override {
    check_exchange(rank(), size(), send, recv);
    run(CallKind::kAlltoallv, send, recv, timeout);
    copy_own_entry(rank(), send, recv);
  }

  void barrier(Timeout timeout) override { run(CallKind::kBarrier, {}, {}, timeout); }

  void abort(std::string_view reason) noexcept override {
    try {
      const std::lock_guard lock(world_.mutex());
      world_.declare(ErrorCode::kPeerLost, concat("rank ", rank(), " aborted: ", reason),
                     {id_, num_completed_});
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch)
      // No memory for the words: the peers find out through their timeout.
    }
  }

 private:
  void run(CallKind kind, SendSpans send, RecvSpans recv, Timeout timeout) {
    {
      const std::lock_guard lock(world_.mutex());
      DISTMOE_CHECK(world_.is_usable() || world_.fault(), kClosed, "rank ", rank(),
                    ": the program has finalised MPI");
      world_.check_thread();
      world_.note_patience(timeout);
    }
    const CallId call{id_, ++num_calls_, kind};
    ExchangeCall::run(std::make_shared<ExchangeCall>(world_, call, send, recv), timeout);
    num_completed_ = call.number;
  }

  World& world_;
  CommunicatorId id_;
  std::uint64_t num_calls_ = 0;
  std::atomic<std::uint64_t> num_completed_ = 0;  // abort() may come from another thread
};

}  // namespace

}  // namespace distmoe::mpi

extern "C" DISTMOE_EXPORT bool distmoe_make_mpi_communicator(
    const char* version, std::shared_ptr<distmoe::Communicator>* communicator) {
  if (std::string_view(version) != DISTMOE_MPI_MODULE_VERSION) return false;
  *communicator = std::make_shared<distmoe::mpi::MpiCommunicator>();
  return true;
}
