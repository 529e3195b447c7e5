// SPDX-License-Identifier: Apache-2.0
//
// The part of NCCL's binary interface that the engine uses, from version 2.28 on. NCCL promises
// that programs built against one version 2.x run with later ones; these declarations are the only
// thing that distmoe knows of its headers (docs/dependencies.md says why they are not included).
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

namespace distmoe::nccl {

inline constexpr const char* kLibraryFile = "libnccl.so.2";

/// As ncclGetVersion() codes versions.
constexpr int version_code(int major, int minor, int patch) {
  return major * 10000 + minor * 100 + patch;
}
inline constexpr int kOldestVersion = version_code(2, 28, 0);
/// From here on a host function knows the addresses of peers.
inline constexpr int kPeerPointerVersion = version_code(2, 29, 0);

struct OpaqueComm;
using Comm = OpaqueComm*;
/// A handle; up to 2.28 the address of a WindowHead in device memory.
using Window = void*;

struct UniqueId {
  char bytes[128];
};

enum class Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

/// The head of the configuration: NCCL takes `size` bytes of it and its defaults for the rest.
struct ConfigHead {
  std::size_t size = sizeof(ConfigHead);
  unsigned int magic = 0xCAFEBEEFU;
  unsigned int version = kOldestVersion;
  int is_blocking = 0;
  int cluster_size = INT_MIN;  ///< NCCL's default, as for min_blocks
  int min_blocks = INT_MIN;
  int max_blocks = 1;  ///< of a collective: distmoe runs none, and buffers grow with them
};
static_assert(sizeof(ConfigHead) == 32);

/// Both ranks and NCCL treat the memory of all ranks as one symmetric window.
inline constexpr int kSymmetricWindow = 1;

/// A group of ranks whose memory this GPU addresses with loads and stores; consecutive ranks.
struct Team {
  int size;
  int rank;
  int stride;
};

/// What NCCL 2.28's device functions read of a window: rank r of the team has its memory at
/// team_base + (r * stride_4g << 32).
struct WindowHead {
  void* host;
  std::uint64_t team_base;
  int team_rank;
  int world_rank;
  std::uint32_t stride_4g;
};

}  // namespace distmoe::nccl
