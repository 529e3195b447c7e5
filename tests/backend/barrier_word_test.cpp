// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a rank goes on only with a peer that has come to the same barrier; what a peer that
// failed, gave up or ran ahead left in its word is never taken for an arrival, wrapped epochs
// included.
#include "backend/cuda/barrier_word.hpp"

#include <gtest/gtest.h>

namespace distmoe::cuda {
namespace {

constexpr std::uint32_t kEpochs[] = {kEpochStep, 400, 0x7FFFFFF8, 0x80000000, 0xFFFFFFF8, 0};

TEST(BarrierWord, APeerIsAwaitedUntilItComes) {
  for (const std::uint32_t epoch : kEpochs) {
    EXPECT_EQ(peer_state(epoch - kEpochStep, epoch), PeerState::kAwaited) << epoch;
    // Of the barrier before, whose failure all know.
    EXPECT_EQ(peer_state((epoch - kEpochStep) | kCallFailedBit, epoch), PeerState::kAwaited);
    EXPECT_EQ(peer_state(epoch, epoch), PeerState::kArrived) << epoch;
    EXPECT_EQ(peer_state(epoch | kCallFailedBit, epoch), PeerState::kCallFailed) << epoch;
  }
}

TEST(BarrierWord, APeerThatRanAheadIsGone) {
  for (const std::uint32_t epoch : kEpochs) {
    EXPECT_EQ(peer_state(epoch + kEpochStep, epoch), PeerState::kGone) << epoch;
    EXPECT_EQ(peer_state((epoch + kEpochStep) | kCallFailedBit, epoch), PeerState::kGone);
  }
}

/// What it did before it left, it did: the barrier at which it was counts, later ones never come.
TEST(BarrierWord, APeerThatIsLostOrLeftIsSoFromTheNextBarrierOn) {
  constexpr struct {
    std::uint32_t bit;
    PeerState later;
  } kKinds[] = {{kRankLostBit, PeerState::kGone}, {kRankLeftBit, PeerState::kLeft}};
  for (const auto& [bit, later] : kKinds) {
    for (const std::uint32_t epoch : kEpochs) {
      EXPECT_EQ(peer_state(epoch | bit, epoch), PeerState::kArrived) << epoch;
      EXPECT_EQ(peer_state(epoch | bit | kCallFailedBit, epoch), PeerState::kCallFailed) << epoch;
      for (const std::uint32_t seen : {epoch - 2 * kEpochStep, epoch - kEpochStep}) {
        EXPECT_EQ(peer_state(seen | bit, epoch), later) << epoch;
        EXPECT_EQ(peer_state(seen | bit | kCallFailedBit, epoch), later) << epoch;
      }
    }
  }
}

}  // namespace
}  // namespace distmoe::cuda
