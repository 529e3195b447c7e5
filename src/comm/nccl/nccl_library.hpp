// SPDX-License-Identifier: Apache-2.0
//
// NCCL, loaded at run time.
#pragma once

#include <string>

#include "comm/nccl/nccl_abi.hpp"

namespace distmoe::nccl {

/// The functions of the library, under their names there without "nccl".
struct Library {
  Result (*get_version)(int* version);
  Result (*get_unique_id)(UniqueId* id);
  Result (*comm_init_rank_config)(Comm* comm, int size, UniqueId id, int rank, ConfigHead* config);
  Result (*comm_get_async_error)(Comm comm, Result* error);
  Result (*comm_abort)(Comm comm);
  Result (*mem_alloc)(void** base, std::size_t bytes);
  Result (*mem_free)(void* base);
  Result (*comm_window_register)(Comm comm, void* base, std::size_t bytes, Window* window,
                                 int flags);
  Result (*comm_window_deregister)(Comm comm, Window window);
  Team (*team_lsa)(Comm comm);
  const char* (*get_error_string)(Result result);
  const char* (*get_last_error)(Comm comm);
  /// Null before kPeerPointerVersion.
  Result (*get_peer_device_pointer)(Window window, std::size_t offset, int peer, void** pointer);

  int version = 0;
  std::string path;     ///< of the file
  std::string problem;  ///< why it cannot be used; empty where it can
};

/// "2.28.9".
std::string version_text(int version);

/// Loads it at first use, and never unloads it.
const Library& library();

/// `what` failed with `result`, in words, with NCCL's own.
std::string failure_text(const char* what, Result result, Comm comm);

}  // namespace distmoe::nccl
