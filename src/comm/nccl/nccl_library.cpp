// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/nccl_library.hpp"

#include <dlfcn.h>

#include "comm/nccl_engine.hpp"
#include "core/check.hpp"
#include "core/environment.hpp"

namespace distmoe {
namespace nccl {
namespace {

/// Looks functions up until one is missing.
class Symbols {
 public:
  explicit Symbols(void* handle) : handle_(handle) {}

  template <typename Function>
  void find(const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(handle_, name));
    if (function == nullptr && missing_.empty()) missing_ = name;
  }
  const std::string& missing() const { return missing_; }

 private:
  void* handle_;
  std::string missing_;
};

std::string path_of(void* function) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

std::string find_functions(void* handle, Library& library) {
  Symbols symbols(handle);
  symbols.find("ncclGetVersion", library.get_version);
  if (library.get_version == nullptr) return "it has no ncclGetVersion";
  library.path = path_of(reinterpret_cast<void*>(library.get_version));
  if (library.get_version(&library.version) != Result::kSuccess) return "it has no version";
  if (library.version < kOldestVersion) {
    return concat(library.path, " is NCCL ", version_text(library.version), "; ",
                  version_text(kOldestVersion), " or later is needed");
  }
  symbols.find("ncclGetUniqueId", library.get_unique_id);
  symbols.find("ncclCommInitRankConfig", library.comm_init_rank_config);
  symbols.find("ncclCommGetAsyncError", library.comm_get_async_error);
  symbols.find("ncclCommAbort", library.comm_abort);
  symbols.find("ncclMemAlloc", library.mem_alloc);
  symbols.find("ncclMemFree", library.mem_free);
  symbols.find("ncclCommWindowRegister", library.comm_window_register);
  symbols.find("ncclCommWindowDeregister", library.comm_window_deregister);
  symbols.find("ncclTeamLsa", library.team_lsa);
  symbols.find("ncclGetErrorString", library.get_error_string);
  symbols.find("ncclGetLastError", library.get_last_error);
  if (library.version >= kPeerPointerVersion) {
    symbols.find("ncclGetPeerDevicePointer", library.get_peer_device_pointer);
  }
  if (symbols.missing().empty()) return {};
  return concat(library.path, " (NCCL ", version_text(library.version), ") has no ",
                symbols.missing());
}

Library load() {
  Library library{};
  std::string file = environment().nccl_library;
  if (file.empty()) file = kLibraryFile;
  // NOTE: a program that uses NCCL itself has decided about multicast.
  if (void* loaded = dlopen(file.c_str(), RTLD_NOW | RTLD_NOLOAD)) {
    dlclose(loaded);
  } else {
    leave_nvlink_multicast_unused();
  }
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    library.problem = concat("NCCL cannot be loaded: ", reason != nullptr ? reason : file);
  } else {
    library.problem = find_functions(handle, library);
  }
  return library;
}

}  // namespace

std::string version_text(int version) {
  return concat(version / 10000, '.', version / 100 % 100, '.', version % 100);
}

const Library& library() {
  static const Library instance = load();
  return instance;
}

std::string failure_text(const char* what, Result result, Comm comm) {
  const Library& nccl = library();
  const char* details = nccl.get_last_error(comm);
  std::string text = concat("NCCL: ", nccl.get_error_string(result), " from ", what);
  if (details != nullptr && *details != '\0') text += concat(": ", details);
  return text;
}

}  // namespace nccl

std::string nccl_engine_problem() { return nccl::library().problem; }

std::string nccl_library_text() {
  const nccl::Library& library = nccl::library();
  if (!library.problem.empty()) return {};
  return concat("NCCL ", nccl::version_text(library.version), " from ", library.path);
}

}  // namespace distmoe
