// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/device_memory.hpp"
#include "backend/cuda/published.hpp"

namespace distmoe::cuda {

/// What this rank learns of its peers' windows at creation.
struct PeerMap {
  std::vector<PeerWindows> windows;  ///< of every rank, as this device addresses them
  int ranks_on_device = 1;           ///< that share this rank's device, this one included
};

/// Collective: exchanges the addresses of the windows. Ranks of one process use each other's
/// pointers (peer access is enabled where their devices differ), ranks of several processes the
/// communicator's symmetric memory. Throws unsupported where neither lets this device reach a peer.
PeerMap map_peer_windows(const BackendSetup& setup, const DeviceMemory& memory);

}  // namespace distmoe::cuda
