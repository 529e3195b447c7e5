// SPDX-License-Identifier: Apache-2.0
//
// The NCCL engine: calls of the host's communicator, memory of NCCL's.
#include <memory>
#include <utility>
#include <vector>

#include "comm/exchange.hpp"
#include "comm/nccl/gpu.hpp"
#include "comm/nccl/nccl_group.hpp"
#include "comm/nccl/nccl_memory.hpp"
#include "comm/nccl/together.hpp"
#include "comm/nccl_engine.hpp"
#include "core/check.hpp"
#include "core/process_token.hpp"

namespace distmoe {
namespace nccl {
namespace {

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<Communicator> host, int device, Timeout timeout)
      : host_(std::move(host)) {
    if (host_->size() == 1) return;
    group_ = std::make_unique<NcclGroup>(*host_, device, timeout);
    memory_ = std::make_unique<NcclMemory>(*host_, *group_, timeout);
  }

  int rank() const noexcept override { return host_->rank(); }
  int size() const noexcept override { return host_->size(); }
  std::string_view name() const noexcept override { return "nccl"; }
  void alltoallv(SendSpans send, RecvSpans recv, Timeout timeout) override {
    host_->alltoallv(send, recv, timeout);
  }
  void barrier(Timeout timeout) override { host_->barrier(timeout); }
  void abort(std::string_view reason) noexcept override { host_->abort(reason); }
  SymmetricMemory* symmetric_memory() noexcept override { return memory_.get(); }

 private:
  std::shared_ptr<Communicator> host_;
  std::unique_ptr<NcclGroup> group_;  ///< null for a single rank
  std::unique_ptr<NcclMemory> memory_;
};

struct Participant {
  GpuId gpu{};
  std::int64_t version = 0;
  std::uint64_t process = 0;
};

void check_pair(const std::vector<Participant>& group, std::size_t lower, std::size_t rank) {
  // NOTE: NCCL frees what an ended communicator had on a thread of its own, some time later, which
  // waits for the kernels of this process: a rank that waits for another one here might keep it.
  DISTMOE_CHECK(group[lower].process != group[rank].process, kUnsupported, "ranks ", lower, " and ",
                rank, " are threads of one process, which need no NCCL: they address each other's ",
                "GPUs anyway");
  DISTMOE_CHECK(group[lower].gpu != group[rank].gpu, kUnsupported, "ranks ", lower, " and ", rank,
                " use the same GPU: NCCL needs one for every rank; ranks that are threads of one "
                "process (make_thread_group, --engine threads) may share one");
}

/// What NCCL would refuse with other words, or not at all.
void check_group(const std::vector<Participant>& group) {
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    DISTMOE_CHECK(group[rank].version == group[0].version, kPeerMismatch, "rank 0 has NCCL ",
                  version_text(static_cast<int>(group[0].version)), ", but rank ", rank, " ",
                  version_text(static_cast<int>(group[rank].version)));
    for (std::size_t lower = 0; lower < rank; ++lower) check_pair(group, lower, rank);
  }
}

void check_participants(Communicator& host, int device, Communicator::Timeout timeout) {
  Participant mine;
  do_together(host, timeout, "the NCCL engine", [&] {
    const Library& nccl = library();
    DISTMOE_CHECK(nccl.problem.empty(), kUnsupported,
                  "the NCCL engine cannot be used: ", nccl.problem);
    mine = {.gpu = id_of_gpu(device), .version = nccl.version, .process = process_token()};
  });
  std::vector<Participant> all(static_cast<std::size_t>(host.size()), mine);
  if (host.size() > 1) all_gather(host, mine, std::span(all), timeout);
  check_group(all);
}

}  // namespace
}  // namespace nccl

std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<Communicator> host, int device,
                                                     Communicator::Timeout timeout) {
  DISTMOE_CHECK(host != nullptr, kInvalidArgument,
                "make_nccl_communicator needs a communicator of the host");
  nccl::check_participants(*host, device, timeout);
  return std::make_shared<nccl::NcclCommunicator>(std::move(host), device, timeout);
}

}  // namespace distmoe
