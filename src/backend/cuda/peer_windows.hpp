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

/// Collective: exchanges the addresses of the windows. The ranks are threads of one process and use
/// each other's pointers; peer access is enabled where their devices differ. Throws unsupported for
/// ranks of several processes and for devices that cannot reach each other.
PeerMap map_peer_windows(const BackendSetup& setup, const DeviceMemory& memory);

}  // namespace distmoe::cuda
