// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/device_memory.hpp"
#include "backend/cuda/published.hpp"

namespace distmoe::cuda {

/// What this rank learns of its peers' windows at creation.
struct PeerMap {
  std::vector<PeerWindows> windows;  ///< of every rank, as this device addresses them
  /// Shares of the windows of peers of this process, see shared_windows.hpp.
  std::vector<std::shared_ptr<std::byte>> held;
  int ranks_on_device = 1;  ///< that share this rank's device, this one included
};

/// Null where the windows are ordinary device memory.
SymmetricMemory* symmetric_memory(const BackendSetup& setup);

/// Collective: finds the windows of all ranks. Where the communicator has symmetric memory it knows
/// their addresses. Elsewhere the ranks must be threads of one process and use each other's
/// pointers; peer access is enabled where their devices differ. Throws unsupported where a window
/// cannot be addressed.
PeerMap map_peer_windows(const BackendSetup& setup, const DeviceMemory& memory);

}  // namespace distmoe::cuda
