// SPDX-License-Identifier: Apache-2.0
//
// Memory of a GPU that NCCL allocated and registered as a symmetric window, with the addresses
// under which this GPU reaches the same memory of its peers.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "comm/nccl/nccl_group.hpp"
#include "distmoe/communicator.hpp"

namespace distmoe::nccl {

class NcclMemory final : public SymmetricMemory {
 public:
  NcclMemory(Communicator& host, NcclGroup& group, Communicator::Timeout timeout)
      : host_(host), group_(group), timeout_(timeout) {}
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;
  ~NcclMemory() override;

  void* allocate(std::size_t bytes) override;
  void free(void* base) override;
  void* peer_pointer(void* base, int peer) override;

 private:
  struct Allocation {
    Window window = nullptr;
    std::vector<void*> peers;  ///< of every rank; null where not visible
  };

  void* take(std::size_t bytes);
  Window register_window(void* base, std::size_t bytes);
  std::vector<void*> find_peers(void* base, Window window) const;
  std::vector<void*> ask_host(void* base, Window window) const;
  std::vector<void*> ask_window(void* base, Window window) const;
  void verify(void* base, const std::vector<void*>& peers);
  void release(void* base, Window window) noexcept;
  /// False, with a warning, where `call` takes too long, and then goes on alone, or fails.
  bool ends_in_time(const char* what, std::function<void()> call) noexcept;

  Communicator& host_;
  NcclGroup& group_;
  Communicator::Timeout timeout_;
  std::map<void*, Allocation> allocations_;
  std::uint64_t num_allocations_ = 0;  ///< of all times
};

}  // namespace distmoe::nccl
