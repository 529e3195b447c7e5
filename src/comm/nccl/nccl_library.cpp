// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/nccl_library.hpp"

#include <dlfcn.h>

#include <filesystem>
#include <string>
#include <system_error>

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
  if (library.get_version == nullptr) {
    return "NCCL cannot be used: the library that was loaded has no ncclGetVersion, so that it is "
           "no NCCL";
  }
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

/// In words: what a named file is where it is no library, else what the loader says.
std::string load_problem(const std::string& named, const char* reason) {
  const std::string loader = reason != nullptr ? reason : named;
  if (named.empty()) return "NCCL cannot be loaded: " + loader;
  std::error_code error;
  const std::string name = concat("DISTMOE_NCCL_LIBRARY names \"", named, "\"");
  constexpr const char* kLegal = "; set it to the file libnccl.so.2 itself, or leave it unset";
  if (std::filesystem::is_directory(named, error)) {
    return concat("NCCL cannot be loaded: ", name, ", which is a folder", kLegal);
  }
  const bool is_path = named.find('/') != std::string::npos;
  if (is_path && !std::filesystem::exists(named, error)) {
    return concat("NCCL cannot be loaded: ", name, ", and there is no such file", kLegal);
  }
  return concat("NCCL cannot be loaded: ", name, ", which does not load (", loader, ")", kLegal);
}

Library load() {
  Library library{};
  const std::string& named = environment().nccl_library;
  const std::string file = named.empty() ? kLibraryFile : named;
  // NOTE: a program that uses NCCL itself has decided about multicast.
  if (void* loaded = dlopen(file.c_str(), RTLD_NOW | RTLD_NOLOAD)) {
    dlclose(loaded);
  } else {
    leave_nvlink_multicast_unused();
  }
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    library.problem = load_problem(named, reason);
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
