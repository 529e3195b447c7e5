// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/peer_windows.hpp"

#include <cuda_runtime_api.h>

#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/shared_windows.hpp"
#include "comm/agreement.hpp"
#include "core/check.hpp"
#include "core/process_token.hpp"
#include "layout/context_buffers.hpp"

namespace distmoe::cuda {
namespace {

struct WindowRecord {
  std::uint64_t base = 0;   ///< of the rank's windows, in its own address space
  std::uint64_t offer = 0;  ///< under which threads of its process find them
  std::uint64_t process = 0;
  std::int32_t device = 0;
  std::int32_t reserved = 0;
};

void enable_peer_access(int device, int peer_device) {
  int is_possible = 0;
  DISTMOE_CUDA_CHECK(cudaDeviceCanAccessPeer(&is_possible, device, peer_device));
  DISTMOE_CHECK(is_possible != 0, kUnsupported, "CUDA device ", device,
                " cannot address the memory of device ", peer_device,
                "; ranks of one context need NVLink or PCIe peer access");
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer_device, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return;
  }
  DISTMOE_CUDA_CHECK(error);
}

/// Ranks that are threads of this process use each other's pointers.
std::shared_ptr<std::byte> share_windows(const WindowRecord& mine, const WindowRecord& peer,
                                         std::size_t rank) {
  DISTMOE_CHECK(peer.process == mine.process, kUnsupported, "rank ", rank, " is another process, ",
                "whose GPU memory this communicator cannot address; ranks of a CUDA context are ",
                "threads of one process, or have a communicator with symmetric memory ",
                "(make_nccl_communicator, --engine nccl)");
  if (peer.device != mine.device) enable_peer_access(mine.device, peer.device);
  std::shared_ptr<std::byte> windows = claim_windows(peer.offer);
  DISTMOE_CHECK(windows != nullptr, kPeerLost, "rank ", rank, " has freed its windows already");
  return windows;
}

std::uint64_t symmetric_base(SymmetricMemory& symmetric, std::byte* windows, std::size_t rank) {
  const void* pointer = symmetric.peer_pointer(windows, static_cast<int>(rank));
  DISTMOE_CHECK(pointer != nullptr, kUnsupported, "the GPU memory of rank ", rank,
                " is not visible from here: the GPUs of a context need NVLink or PCIe peer access");
  return reinterpret_cast<std::uint64_t>(pointer);
}

}  // namespace

SymmetricMemory* symmetric_memory(const BackendSetup& setup) {
  return setup.communicator != nullptr ? setup.communicator->symmetric_memory() : nullptr;
}

PeerMap map_peer_windows(const BackendSetup& setup, const DeviceMemory& memory) {
  const auto size = static_cast<std::size_t>(setup.size);
  std::byte* const windows = memory.windows().get();
  const WindowRecord mine{.base = reinterpret_cast<std::uint64_t>(windows),
                          .offer = size > 1 ? offer_windows(memory.windows()) : 0,
                          .process = process_token(),
                          .device = setup.device};
  std::vector<WindowRecord> all(size, mine);
  if (size > 1) all_gather(*setup.communicator, mine, std::span(all), setup.timeout);

  PeerMap map;
  map.ranks_on_device = 0;
  const auto offset = [&](const char* name) {
    const std::byte* buffer = memory.buffer(name);
    return buffer == nullptr ? 0 : static_cast<std::uint64_t>(buffer - windows);
  };
  SymmetricMemory* const symmetric = symmetric_memory(setup);
  for (std::size_t rank = 0; rank < size; ++rank) {
    const WindowRecord& peer = all[rank];
    if (peer.process == mine.process && peer.device == mine.device) ++map.ranks_on_device;
    // NOTE: this rank always uses one address of its own memory, though a peer table has another.
    std::uint64_t base = mine.base;
    if (static_cast<int>(rank) != setup.rank && symmetric != nullptr) {
      base = symmetric_base(*symmetric, windows, rank);
    } else if (static_cast<int>(rank) != setup.rank) {
      base = peer.base;
      map.held.push_back(share_windows(mine, peer, rank));
    }
    map.windows.push_back({.x = base + offset(buffer_name::kDispatchWindow),
                           .ids = base + offset(buffer_name::kIdWindow),
                           .combine = base + offset(buffer_name::kCombineWindow),
                           .flags = base + offset(buffer_name::kFlagWindow)});
  }
  return map;
}

}  // namespace distmoe::cuda
