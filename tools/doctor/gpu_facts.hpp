// SPDX-License-Identifier: Apache-2.0
//
// What the NVIDIA driver of this machine says, as far as distmoe cares.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace distmoe::tools {

struct Gpu {
  std::string name;
  int major = 0;  ///< compute capability
  int minor = 0;
  std::int64_t memory_bytes = 0;
  bool has_virtual_memory = false;  ///< CUDA virtual memory management
  std::vector<int> peers;           ///< ordinals of the GPUs whose memory it addresses
};

struct GpuFacts {
  bool is_compiled = false;     ///< this build has the CUDA backend
  std::string kernel_module{};  ///< version of NVIDIA's kernel module; empty: none is loaded
  int driver_cuda = 0;    ///< newest CUDA that the driver serves, 13000 for 13.0; 0: no driver
  int runtime_cuda = 0;   ///< CUDA of this build
  std::string problem{};  ///< why the CUDA backend cannot run; empty where it can
  std::string pinned_problem{};  ///< why host memory cannot be pinned; empty where it can
  std::vector<Gpu> gpus{};

  bool can_run() const { return is_compiled && problem.empty(); }
};

GpuFacts inspect_gpus();

/// Fills in what the driver says; leaves `facts` as it is in a build without CUDA.
void ask_driver(GpuFacts& facts);

/// The text of /proc/driver/nvidia/version, or of a file like it: "580.159.04", empty where it
/// names no version.
std::string kernel_module_version(const std::string& text);

struct LinkRate {
  std::optional<double> gb_s;  ///< of the slowest GPU, each reading while it is read
  std::string why_not;
};

/// Every one of the GPUs [0, num_gpus) reads the memory of the next one.
LinkRate measure_link(int num_gpus);

}  // namespace distmoe::tools
