// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/nccl_memory.hpp"

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/nccl/gpu.hpp"
#include "comm/nccl/together.hpp"
#include "core/check.hpp"
#include "core/log.hpp"

namespace distmoe::nccl {
namespace {

constexpr std::chrono::milliseconds kReleasePatience{5000};
constexpr const char* kWhat = "symmetric memory";

/// What a rank writes at the beginning of new memory, so that its peers recognise it.
using Mark = std::array<std::uint64_t, 2>;

Mark mark_of(int rank, std::uint64_t number) {
  return {0x646973746D6F6531U + static_cast<std::uint64_t>(rank), number};
}

/// NOTE: NCCL writes the handle on a thread of its own, which may be there still when the wait for
/// it, and for its end, has been given up. So it stays.
void abandon(std::unique_ptr<Window> window) {
  static std::mutex mutex;
  static auto& abandoned = *new std::vector<std::unique_ptr<Window>>;
  const std::lock_guard lock(mutex);
  abandoned.push_back(std::move(window));
}

}  // namespace

NcclMemory::~NcclMemory() {
  for (const auto& [base, allocation] : allocations_) release(base, allocation.window);
}

void* NcclMemory::allocate(std::size_t bytes) {
  DISTMOE_CHECK(bytes >= sizeof(Mark), kInvalidArgument, "symmetric memory of ", bytes,
                " bytes; legal: ", sizeof(Mark), " or more");
  void* base = nullptr;
  Allocation allocation;
  // NOTE: ranks may free at different times, but they allocate together.
  ++num_allocations_;
  try {
    do_together(host_, timeout_, kWhat, [&] { base = take(bytes); });
    do_together(host_, timeout_, kWhat, [&] {
      allocation.window = register_window(base, bytes);
      allocation.peers = find_peers(base, allocation.window);
      const auto mark = mark_of(host_.rank(), num_allocations_);
      write_gpu(base, std::as_bytes(std::span(mark)));
    });
    do_together(host_, timeout_, kWhat, [&] { verify(base, allocation.peers); });
  } catch (...) {
    if (base != nullptr) release(base, allocation.window);
    throw;
  }
  allocations_.emplace(base, std::move(allocation));
  return base;
}

void NcclMemory::free(void* base) {
  const auto found = allocations_.find(base);
  if (found == allocations_.end()) return;
  const Window window = found->second.window;
  allocations_.erase(found);
  release(base, window);
}

void* NcclMemory::peer_pointer(void* base, int peer) {
  const auto found = allocations_.find(base);
  DISTMOE_CHECK(found != allocations_.end(), kInvalidArgument,
                "no symmetric memory begins at this address");
  DISTMOE_CHECK(peer >= 0 && peer < host_.size(), kInvalidArgument, "peer is ", peer,
                "; legal: 0..", host_.size() - 1);
  return found->second.peers[static_cast<std::size_t>(peer)];
}

void* NcclMemory::take(std::size_t bytes) {
  DISTMOE_CHECK(group_.handle() != nullptr, kClosed, "the NCCL group ended with an earlier fault");
  DISTMOE_CHECK(current_gpu() == group_.device(), kInvalidArgument, "rank ", host_.rank(),
                " made its communicator for CUDA device ", group_.device(),
                ", but uses it with device ", current_gpu());
  const std::size_t free_bytes = free_gpu_bytes();
  void* base = nullptr;
  const Result result = library().mem_alloc(&base, bytes);
  DISTMOE_CHECK(result == Result::kSuccess && base != nullptr, kOutOfMemory, "the context needs ",
                bytes, " bytes of device memory for its peers in one piece; ", free_bytes,
                " are free (", failure_text("ncclMemAlloc", result, group_.handle()), ")");
  return base;
}

Window NcclMemory::register_window(void* base, std::size_t bytes) {
  auto window = std::make_unique<Window>();
  try {
    group_.finish("ncclCommWindowRegister",
                  library().comm_window_register(group_.handle(), base, bytes, window.get(),
                                                 kSymmetricWindow));
  } catch (...) {
    abandon(std::move(window));
    throw;
  }
  return *window;
}

std::vector<void*> NcclMemory::find_peers(void* base, Window window) const {
  std::vector<void*> peers;
  if (window != nullptr) {
    peers = library().get_peer_device_pointer != nullptr ? ask_host(base, window)
                                                         : ask_window(base, window);
  }
  DISTMOE_CHECK(!peers.empty(), kUnsupported,
                "NCCL offers no symmetric memory here: every GPU of the group must reach every "
                "other over NVLink or PCIe peer access, and neither NCCL_WIN_ENABLE nor "
                "NCCL_CUMEM_ENABLE may be 0");
  return peers;
}

std::vector<void*> NcclMemory::ask_host(void* base, Window window) const {
  std::vector<void*> peers;
  for (int peer = 0; peer < host_.size(); ++peer) {
    void* pointer = base;
    if (peer != host_.rank() &&
        library().get_peer_device_pointer(window, 0, peer, &pointer) != Result::kSuccess) {
      return {};
    }
    peers.push_back(pointer);
  }
  return peers;
}

/// What ncclGetPeerPointer computes on a device.
std::vector<void*> NcclMemory::ask_window(void* base, Window window) const {
  // NOTE: without symmetric memory the handle is an address of the host.
  if (!is_device_memory(window)) return {};
  WindowHead head{};
  read_gpu(window, std::as_writable_bytes(std::span(&head, 1)));
  const Team team = library().team_lsa(group_.handle());
  std::vector<void*> peers;
  for (int peer = 0; peer < host_.size(); ++peer) {
    const int member = head.team_rank + peer - head.world_rank;
    const std::uint64_t stride = static_cast<std::uint64_t>(head.stride_4g) << 32;
    void* pointer = peer == host_.rank() ? base : nullptr;
    if (peer != host_.rank() && member >= 0 && member < team.size) {
      const std::uint64_t address = head.team_base + static_cast<std::uint64_t>(member) * stride;
      // NOLINTNEXTLINE(performance-no-int-to-ptr): a device address, which the host never follows
      pointer = reinterpret_cast<void*>(address);
    }
    peers.push_back(pointer);
  }
  return peers;
}

/// NOTE: an address that is not what it should be would be found by wrong results only.
void NcclMemory::verify(void* base, const std::vector<void*>& peers) {
  for (int peer = 0; peer < host_.size(); ++peer) {
    const void* address = peers[static_cast<std::size_t>(peer)];
    if (address == nullptr || address == base) continue;
    Mark mark{};
    read_gpu(address, std::as_writable_bytes(std::span(mark)));
    DISTMOE_CHECK(mark == mark_of(peer, num_allocations_), kInternal, "rank ", host_.rank(),
                  " does not find the memory of rank ", peer, " where NCCL ",
                  version_text(library().version), " says it is");
  }
}

/// NOTE: both are local in every version seen, but nothing promises it: a peer that died must not
/// keep this rank.
void NcclMemory::release(void* base, Window window) noexcept {
  const Comm comm = group_.handle();
  if (comm != nullptr && window != nullptr && !ends_in_time("ncclCommWindowDeregister", [=] {
        library().comm_window_deregister(comm, window);
      })) {
    group_.abort();
  }
  ends_in_time("ncclMemFree", [=] { library().mem_free(base); });
}

bool NcclMemory::ends_in_time(const char* what, std::function<void()> call) noexcept {
  try {
    if (run_bounded(group_.device(), std::move(call), kReleasePatience)) return true;
    log(LogLevel::kWarning, concat("NCCL: ", what, " did not end within ", kReleasePatience.count(),
                                   " ms; it is left alone"));
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, concat("NCCL: ", what, ": ", error.what()));
  }
  return false;
}

}  // namespace distmoe::nccl
