// SPDX-License-Identifier: Apache-2.0
//
// What a rank says in its flag word of a barrier, one in the window of each peer: how often it has
// come to that barrier, whether its call has failed by then, and whether it has left the others for
// good. Shared by host and device.
//
// A rank that leaves has still been where it was: a peer that waits for it there goes on, and finds
// it gone at the next barrier.
#pragma once

#include <cstdint>

#include "formats/host_device.hpp"

namespace distmoe::cuda {

/// Epochs count in the bits above; they wrap, and are compared as signed distances.
inline constexpr std::uint32_t kCallFailedBit = 1;
/// The rank gave up on a peer: it never comes to another barrier. Others may wait for that peer
/// too, and name it themselves.
inline constexpr std::uint32_t kRankLostBit = 2;
/// The rank's host left, so that nobody need wait for anybody.
inline constexpr std::uint32_t kRankLeftBit = 4;
inline constexpr std::uint32_t kEpochStep = 8;

/// A peer as its word shows it to a rank that waits for it.
enum class PeerState : std::int32_t {
  kAwaited,
  kArrived,
  kCallFailed,  ///< arrived, and its call has failed
  kGone,        ///< lost before it came here; or it is ahead, because it did not wait for this rank
  kLeft,        ///< before it came here
};

/// `epoch` is that of the waiting rank.
DISTMOE_HOST_DEVICE constexpr PeerState peer_state(std::uint32_t seen, std::uint32_t epoch) {
  const std::uint32_t peer_epoch = seen & ~(kEpochStep - 1);
  const auto distance = static_cast<std::int32_t>(peer_epoch - epoch);
  if (distance > 0) return PeerState::kGone;
  if (distance < 0) {
    if ((seen & kRankLeftBit) != 0) return PeerState::kLeft;
    return (seen & kRankLostBit) != 0 ? PeerState::kGone : PeerState::kAwaited;
  }
  return (seen & kCallFailedBit) != 0 ? PeerState::kCallFailed : PeerState::kArrived;
}

}  // namespace distmoe::cuda
