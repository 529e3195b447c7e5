// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_engine.hpp"

#include <dlfcn.h>

#include <filesystem>
#include <vector>

#include "core/check.hpp"
#include "distmoe/version.hpp"

namespace distmoe {

namespace {

namespace fs = std::filesystem;

struct Module {
  MpiFactory factory = nullptr;
  std::string problem;
};

/// Where this code lies (the shared library or the program), then where the program lies.
std::vector<fs::path> own_folders() {
  static const char kAnchor = 0;
  std::vector<fs::path> folders;
  Dl_info info{};
  // NOTE: for the program itself dladdr() repeats argv[0], which may be relative to a folder that
  // is no longer the current one; /proc/self/exe covers it.
  if (dladdr(&kAnchor, &info) != 0 && info.dli_fname != nullptr && info.dli_fname[0] == '/') {
    folders.push_back(fs::path(info.dli_fname).parent_path());
  }
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (!error) folders.push_back(program.parent_path());
  return folders;
}

std::vector<std::string> candidates() {
  std::vector<std::string> files;
  for (const fs::path& folder : own_folders()) {
    for (const fs::path& place : {folder, folder / ".." / "lib"}) {
      std::error_code error;
      if (fs::exists(place / kMpiModuleFile, error)) files.push_back(place / kMpiModuleFile);
    }
  }
  files.emplace_back(kMpiModuleFile);  // the default search path
  return files;
}

Module load_module() {
  Module module;
  const std::string file = candidates().front();
  // The module stays loaded: MPI cannot be initialised twice.
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle != nullptr) {
    module.factory = reinterpret_cast<MpiFactory>(dlsym(handle, kMpiFactorySymbol));
  }
  if (module.factory == nullptr) {
    const char* reason = dlerror();
    module.problem = reason != nullptr ? reason : file + " has no factory";
  }
  return module;
}

const Module& loaded_module() {
  static const Module module = load_module();
  return module;
}

}  // namespace

std::string mpi_engine_problem() { return loaded_module().problem; }

std::shared_ptr<Communicator> make_mpi_communicator() {
  const Module& module = loaded_module();
  DISTMOE_CHECK(module.factory != nullptr, kUnsupported,
                "the MPI engine cannot be loaded: ", module.problem);
  std::shared_ptr<Communicator> communicator;
  DISTMOE_CHECK(module.factory(version(), &communicator), kUnsupported, "the MPI engine that was ",
                "found belongs to another version of distmoe than ", version());
  return communicator;
}

}  // namespace distmoe
