// SPDX-License-Identifier: Apache-2.0
// Invariant: every byte that is said to be read is.
#include "bench/read_streams.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace distmoe::tools {
namespace {

TEST(ReadStreams, FoldsEveryWholeLineOfTheirParts) {
  constexpr std::size_t kBytes = 8 * 3 * 64;
  std::vector<std::byte> data(kBytes + 40);
  for (std::size_t i = 0; i < kBytes; ++i) {
    data[i] = std::byte{1};
    EXPECT_EQ(read_streams(data.data(), data.size()), std::uint64_t{1} << (i % 8 * 8)) << i;
    data[i] = std::byte{0};
  }
  EXPECT_EQ(read_streams(data.data(), data.size()), 0u);
  EXPECT_EQ(read_streams(data.data(), 0), 0u);
}

}  // namespace
}  // namespace distmoe::tools
