// SPDX-License-Identifier: Apache-2.0
//
// What this machine offers, as far as distmoe cares.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace distmoe::tools {

struct Machine {
  std::string processor;  ///< model name; empty where the system does not say
  int cores = 0;          ///< logical processors
  int usable_cores = 0;   ///< of them, those this process may run on
  std::int64_t memory_bytes = 0;
  std::vector<std::string> simd;  ///< vector and matrix extensions that the system has enabled
};

Machine inspect_machine();

/// The features that matter to matrix products among those in `cpuinfo` (the text of
/// /proc/cpuinfo), in a fixed order.
std::vector<std::string> simd_features(std::string_view cpuinfo);

}  // namespace distmoe::tools
