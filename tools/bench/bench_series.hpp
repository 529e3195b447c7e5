// SPDX-License-Identifier: Apache-2.0
//
// What is measured once a round, and on which ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "bench/bench_device.hpp"

namespace distmoe::tools {

/// Ranks that share a machine or a device share its rates: the lowest of them, its leader, measures
/// for all.
struct DeviceSharing {
  std::vector<int> leaders;  ///< ascending
  int ranks_per_device = 1;  ///< the largest number

  bool is_leader(int rank) const;
};

/// From the identities of all ranks' devices.
DeviceSharing device_sharing(std::span<const std::uint64_t> identities);

/// One sample a round; 0 on a rank that takes no part.
struct BenchSeries {
  std::function<double()> measure;  ///< null: this rank takes no part
  std::vector<double> samples;
};

/// Microseconds of a lap divided by the work that it does.
double us_per_work(BenchDevice& device, const Ceiling& ceiling);

}  // namespace distmoe::tools
