// SPDX-License-Identifier: Apache-2.0
#include "machine.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

namespace distmoe::tools {
namespace {

constexpr const char* kFeatures[] = {
    "sse4_2",      "avx",      "avx2",     "fma",      "avx512f", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd",   "sve",         "bf16",
};

// The value of the first line "key<spaces>: value"; empty where there is none.
std::string_view field(std::string_view cpuinfo, std::string_view key) {
  while (!cpuinfo.empty()) {
    const std::string_view line = cpuinfo.substr(0, cpuinfo.find('\n'));
    cpuinfo.remove_prefix(std::min(line.size() + 1, cpuinfo.size()));
    const std::size_t colon = line.find(':');
    if (!line.starts_with(key) || colon == std::string_view::npos) continue;
    if (line.find_first_not_of(" \t", key.size()) != colon) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string_view::npos ? std::string_view() : line.substr(begin);
  }
  return {};
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
}

}  // namespace

std::vector<std::string> simd_features(std::string_view cpuinfo) {
  std::string_view flags = field(cpuinfo, "flags");
  if (flags.empty()) flags = field(cpuinfo, "Features");
  std::istringstream words{std::string(flags)};
  const std::vector<std::string> enabled{std::istream_iterator<std::string>(words), {}};
  std::vector<std::string> found;
  for (const char* feature : kFeatures) {
    if (std::find(enabled.begin(), enabled.end(), feature) != enabled.end()) {
      found.emplace_back(feature);
    }
  }
  return found;
}

Machine inspect_machine() {
  std::ifstream file("/proc/cpuinfo");
  const std::string cpuinfo{std::istreambuf_iterator<char>(file), {}};
  Machine machine;
  machine.processor = field(cpuinfo, "model name");
  machine.cores = static_cast<int>(std::thread::hardware_concurrency());
  machine.usable_cores = usable_cores();
  machine.memory_bytes = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  machine.simd = simd_features(cpuinfo);
  return machine;
}

}  // namespace distmoe::tools
