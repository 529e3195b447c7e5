// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_series.hpp"

#include <algorithm>

#include "bench/bench_call.hpp"

namespace distmoe::tools {

bool DeviceSharing::is_leader(int rank) const {
  return std::ranges::find(leaders, rank) != leaders.end();
}

DeviceSharing device_sharing(std::span<const std::uint64_t> identities) {
  DeviceSharing sharing;
  for (auto identity = identities.begin(); identity != identities.end(); ++identity) {
    if (std::find(identities.begin(), identity, *identity) == identity) {
      sharing.leaders.push_back(static_cast<int>(identity - identities.begin()));
    }
    sharing.ranks_per_device = std::max(
        sharing.ranks_per_device, static_cast<int>(std::ranges::count(identities, *identity)));
  }
  return sharing;
}

double us_per_work(BenchDevice& device, const Ceiling& ceiling) {
  const double us = time_lap(device, [&](bool is_timed) {
    if (is_timed) device.mark(TimeMark::kBegin, device.stream());
    ceiling.workload->enqueue();
    if (is_timed) device.mark(TimeMark::kEnd, device.stream());
  });
  return us / ceiling.work;
}

}  // namespace distmoe::tools
