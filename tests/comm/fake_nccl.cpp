// SPDX-License-Identifier: Apache-2.0
//
// A library with the names of NCCL's functions that does nothing: FAKE_NCCL_VERSION is its version,
// FAKE_NCCL_INIT=hang makes a communicator that is never ready and FAKE_NCCL_INIT=fail none at all,
// FAKE_NCCL_ABORT=hang never returns from an abort (no more than FAKE_NCCL_FREE and
// FAKE_NCCL_DEREGISTER from theirs: half a minute is for ever). FAKE_NCCL_MEMORY=host gives memory
// of the host, as a window of one rank.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "comm/nccl/nccl_abi.hpp"
#include "distmoe/export.hpp"

namespace {

using distmoe::nccl::Comm;
using distmoe::nccl::ConfigHead;
using distmoe::nccl::Result;
using distmoe::nccl::Team;
using distmoe::nccl::UniqueId;
using distmoe::nccl::Window;
using distmoe::nccl::WindowHead;

bool is_told(const char* variable, const char* what) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, what) == 0;
}

void hang_if_told(const char* variable) {
  constexpr int kSeconds = 30;
  for (int i = 0; i < kSeconds && is_told(variable, "hang"); ++i) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
}

int some_object = 0;
WindowHead only_window{};

}  // namespace

extern "C" {

DISTMOE_EXPORT Result ncclGetVersion(int* version) {
  const char* value = std::getenv("FAKE_NCCL_VERSION");
  *version = value == nullptr ? 22809 : std::atoi(value);
  return Result::kSuccess;
}

DISTMOE_EXPORT Result ncclGetUniqueId(UniqueId*) { return Result::kSuccess; }

DISTMOE_EXPORT Result ncclCommInitRankConfig(Comm* comm, int, UniqueId, int, ConfigHead* config) {
  if (config->size != sizeof(ConfigHead) || config->is_blocking != 0) {
    return Result::kInvalidArgument;
  }
  if (is_told("FAKE_NCCL_INIT", "fail")) return Result::kInternalError;
  *comm = reinterpret_cast<Comm>(&some_object);
  return Result::kInProgress;
}

DISTMOE_EXPORT Result ncclCommGetAsyncError(Comm, Result* error) {
  *error = is_told("FAKE_NCCL_INIT", "hang") ? Result::kInProgress : Result::kSuccess;
  return Result::kSuccess;
}

DISTMOE_EXPORT Result ncclCommAbort(Comm) {
  hang_if_told("FAKE_NCCL_ABORT");
  return Result::kSuccess;
}

DISTMOE_EXPORT Result ncclMemAlloc(void** base, std::size_t bytes) {
  if (!is_told("FAKE_NCCL_MEMORY", "host")) return Result::kUnhandledCudaError;
  *base = std::malloc(bytes);
  return Result::kSuccess;
}
DISTMOE_EXPORT Result ncclMemFree(void* base) {
  hang_if_told("FAKE_NCCL_FREE");
  std::free(base);
  return Result::kSuccess;
}
DISTMOE_EXPORT Result ncclCommWindowRegister(Comm, void* base, std::size_t, Window* window, int) {
  if (!is_told("FAKE_NCCL_MEMORY", "host")) return Result::kInternalError;
  only_window.team_base = reinterpret_cast<std::uint64_t>(base);
  *window = &only_window;
  return Result::kSuccess;
}
DISTMOE_EXPORT Result ncclCommWindowDeregister(Comm, Window) {
  hang_if_told("FAKE_NCCL_DEREGISTER");
  return Result::kSuccess;
}
DISTMOE_EXPORT Team ncclTeamLsa(Comm) { return {1, 0, 1}; }
DISTMOE_EXPORT const char* ncclGetErrorString(Result) { return "fake error"; }
DISTMOE_EXPORT const char* ncclGetLastError(Comm) { return "nothing happened"; }

}  // extern "C"
