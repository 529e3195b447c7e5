// SPDX-License-Identifier: Apache-2.0
//
// What this process holds now, as /proc tells it.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace distmoe::conformance {

/// Resident anonymous memory in bytes.
inline std::int64_t anonymous_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("RssAnon:", 0) == 0) return std::stoll(line.substr(8)) * 1024;
  }
  return -1;
}

inline std::int64_t count_entries(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder),
                       std::filesystem::directory_iterator{});
}
inline std::int64_t num_file_descriptors() { return count_entries("/proc/self/fd"); }
inline std::int64_t num_threads() { return count_entries("/proc/self/task"); }

/// Sanitizers keep freed memory and shadow what is touched: sizes say nothing there.
inline constexpr bool kSizesMeanSomething =
#if defined(DISTMOE_SANITIZED)
    false;
#else
    true;
#endif

}  // namespace distmoe::conformance
