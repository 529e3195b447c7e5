// SPDX-License-Identifier: Apache-2.0
// Invariant: the lowest rank of a device leads it.
#include "bench/bench_series.hpp"

#include <gtest/gtest.h>

namespace distmoe::tools {
namespace {

TEST(DeviceSharing, EveryDeviceHasItsLowestRankAsLeader) {
  const DeviceSharing sharing = device_sharing(std::vector<std::uint64_t>{7, 9, 7, 9, 7, 3});
  EXPECT_EQ(sharing.leaders, (std::vector<int>{0, 1, 5}));
  EXPECT_EQ(sharing.ranks_per_device, 3);
  EXPECT_TRUE(sharing.is_leader(5));
  EXPECT_FALSE(sharing.is_leader(2));
}

}  // namespace
}  // namespace distmoe::tools
