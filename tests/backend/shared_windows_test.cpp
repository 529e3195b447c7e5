// SPDX-License-Identifier: Apache-2.0
//
// Invariant: windows live as long as any rank that was shown them, in whatever order ranks let go,
// and are freed once; whoever comes after the last one finds nothing.
#include "backend/cuda/shared_windows.hpp"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace distmoe::cuda {
namespace {

std::shared_ptr<std::byte> counted_windows(int& num_freed) {
  return {new std::byte[16], [&num_freed](std::byte* base) {
            delete[] base;
            ++num_freed;
          }};
}

TEST(SharedWindows, AreFreedByTheLastThatLetsGo) {
  int num_freed = 0;
  std::shared_ptr<std::byte> owner = counted_windows(num_freed);
  const std::uint64_t number = offer_windows(owner);
  EXPECT_NE(number, 0);
  std::shared_ptr<std::byte> peer = claim_windows(number);
  EXPECT_EQ(peer, owner);
  owner.reset();  // its context closed after a lost peer
  EXPECT_EQ(num_freed, 0);
  EXPECT_NE(claim_windows(number), nullptr);
  peer.reset();
  EXPECT_EQ(num_freed, 1);
  EXPECT_EQ(claim_windows(number), nullptr);
}

TEST(SharedWindows, NumbersAreNeverReused) {
  int num_freed = 0;
  std::shared_ptr<std::byte> first = counted_windows(num_freed);
  const std::uint64_t of_first = offer_windows(first);
  first.reset();
  const std::shared_ptr<std::byte> second = counted_windows(num_freed);
  EXPECT_NE(offer_windows(second), of_first);
  EXPECT_EQ(claim_windows(of_first), nullptr);
  EXPECT_EQ(claim_windows(0), nullptr);
}

TEST(SharedWindows, RanksOfferAndClaimAtTheSameTime) {
  int num_freed = 0;
  {
    const std::shared_ptr<std::byte> windows = counted_windows(num_freed);
    std::vector<std::thread> ranks;
    constexpr int kRanks = 8;
    ranks.reserve(kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back([&windows] {
        for (int i = 0; i < 200; ++i) EXPECT_EQ(claim_windows(offer_windows(windows)), windows);
      });
    }
    for (std::thread& rank : ranks) rank.join();
  }
  EXPECT_EQ(num_freed, 1);
}

}  // namespace
}  // namespace distmoe::cuda
