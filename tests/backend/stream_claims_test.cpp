// SPDX-License-Identifier: Apache-2.0
//
// Invariant: two ranks of a context are never told that they may enqueue one call on one stream of
// one device, and nobody else is refused.
#include "backend/cuda/stream_claims.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace distmoe::cuda {
namespace {

class StreamClaims : public testing::Test {
 protected:
  ~StreamClaims() override {
    for (const auto& rank : ranks_) forget_stream(rank.get());
  }
  bool claim(std::size_t rank, std::int64_t call, const void* stream, int device = 0) {
    std::vector<std::shared_ptr<std::byte>> peers = ranks_;
    peers.erase(peers.begin() + static_cast<std::ptrdiff_t>(rank));
    return claim_stream(
        {.windows = ranks_[rank].get(), .device = device, .stream = stream, .call = call}, peers);
  }

  std::vector<std::shared_ptr<std::byte>> ranks_{
      std::make_shared<std::byte>(), std::make_shared<std::byte>(), std::make_shared<std::byte>()};
  int one_ = 1;
  int other_ = 2;
};

TEST_F(StreamClaims, OneStreamTakesOneRankOfACall) {
  EXPECT_TRUE(claim(0, 1, &one_));
  EXPECT_FALSE(claim(1, 1, &one_));
  EXPECT_FALSE(claim(2, 1, &one_));
  EXPECT_TRUE(claim(1, 1, &other_));
  EXPECT_FALSE(claim(2, 1, &other_));
}

TEST_F(StreamClaims, ARankMayUseItsStreamInEveryCallAndAPeersInAnother) {
  EXPECT_TRUE(claim(0, 1, &one_));
  EXPECT_TRUE(claim(0, 1, &one_));
  EXPECT_TRUE(claim(0, 2, &other_));
  EXPECT_TRUE(claim(1, 1, &one_));
  EXPECT_TRUE(claim(1, 2, &one_));
}

TEST_F(StreamClaims, DefaultStreamsOfTwoDevicesAreTwo) {
  EXPECT_TRUE(claim(0, 1, &one_, 0));
  EXPECT_TRUE(claim(1, 1, &one_, 1));
}

TEST_F(StreamClaims, ARefusedRankHoldsNothingAndAForgottenOneNeither) {
  EXPECT_TRUE(claim(0, 1, &one_));
  EXPECT_FALSE(claim(1, 1, &one_));
  forget_stream(ranks_[0].get());
  EXPECT_TRUE(claim(1, 1, &one_));
}

TEST_F(StreamClaims, RanksOfOtherContextsAreNotAsked) {
  EXPECT_TRUE(claim(0, 1, &one_));
  EXPECT_TRUE(claim_stream({.windows = ranks_[1].get(), .stream = &one_, .call = 1}, {}));
}

}  // namespace
}  // namespace distmoe::cuda
