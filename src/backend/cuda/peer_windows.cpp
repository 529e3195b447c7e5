// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/peer_windows.hpp"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include "backend/cuda/cuda_check.hpp"
#include "comm/agreement.hpp"
#include "core/check.hpp"
#include "layout/context_buffers.hpp"

namespace distmoe::cuda {
namespace {

struct WindowRecord {
  std::uint64_t base = 0;  ///< of the rank's windows, in its own address space
  std::int64_t process = 0;
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

}  // namespace

PeerMap map_peer_windows(const BackendSetup& setup, const DeviceMemory& memory) {
  const auto size = static_cast<std::size_t>(setup.size);
  const WindowRecord mine{.base = reinterpret_cast<std::uint64_t>(memory.windows()),
                          .process = getpid(),
                          .device = setup.device};
  std::vector<WindowRecord> all(size, mine);
  if (size > 1) all_gather(*setup.communicator, mine, std::span(all), setup.timeout);

  PeerMap map;
  map.ranks_on_device = 0;
  const auto offset = [&](const char* name) {
    const std::byte* buffer = memory.buffer(name);
    return buffer == nullptr ? 0 : static_cast<std::uint64_t>(buffer - memory.windows());
  };
  for (std::size_t rank = 0; rank < size; ++rank) {
    DISTMOE_CHECK(all[rank].process == mine.process, kUnsupported, "rank ", setup.rank,
                  " cannot address the memory of rank ", rank, " in another process: the CUDA ",
                  "backend of this version runs ranks as threads of one process");
    if (all[rank].device == mine.device) {
      ++map.ranks_on_device;
    } else {
      enable_peer_access(mine.device, all[rank].device);
    }
    const std::uint64_t base = all[rank].base;
    map.windows.push_back({.x = base + offset(buffer_name::kDispatchWindow),
                           .ids = base + offset(buffer_name::kIdWindow),
                           .combine = base + offset(buffer_name::kCombineWindow),
                           .flags = base + offset(buffer_name::kFlagWindow)});
  }
  return map;
}

}  // namespace distmoe::cuda
