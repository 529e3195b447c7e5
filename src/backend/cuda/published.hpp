// SPDX-License-Identifier: Apache-2.0
//
// What a rank makes visible to its peers, and where each rank finds the windows of all. Shared by
// host and device.
#pragma once

#include <cstdint>

#include "formats/host_device.hpp"

namespace distmoe::cuda {

/// The head of the id window; the ids [num_tokens, K] as int32 follow it.
struct alignas(128) PublishedHeader {
  std::int64_t num_tokens;
  std::int64_t bad_route;  ///< smallest token * K + k whose id is illegal, or kNoBadRoute
  std::int64_t bad_id;     ///< of bad_route; of a refused call its ErrorCode
};
static_assert(sizeof(PublishedHeader) == 128);

inline constexpr std::int64_t kNoBadRoute = INT64_MAX;
/// bad_route of a rank whose host refused the arguments of the call.
inline constexpr std::int64_t kRefusedCall = -1;

/// The windows of one rank as this rank's device addresses them.
struct PeerWindows {
  std::uint64_t x;        ///< BF16 [T, D]; of this rank itself: unused
  std::uint64_t ids;      ///< PublishedHeader, int32 [T, K]
  std::uint64_t combine;  ///< BF16 [T, K, D], or of combine per_rank FP32 [T, min(K, P - 1), D]
  std::uint64_t flags;    ///< uint32 [num_ranks, kNumBarriers]
};

/// The barriers of a call, each with flags of its own.
enum class PeerBarrier : std::int32_t { kPublished = 0, kResultsStored = 1 };
inline constexpr int kNumBarriers = 2;

// Addresses of peers' memory travel as integers.
// NOLINTBEGIN(performance-no-int-to-ptr)
DISTMOE_HOST_DEVICE inline const std::int32_t* published_ids(std::uint64_t ids_window) {
  return reinterpret_cast<const std::int32_t*>(ids_window + sizeof(PublishedHeader));
}
DISTMOE_HOST_DEVICE inline const PublishedHeader* published_header(std::uint64_t ids_window) {
  return reinterpret_cast<const PublishedHeader*>(ids_window);
}
// NOLINTEND(performance-no-int-to-ptr)

}  // namespace distmoe::cuda
